"""Fine-tuning: jobs that train a LoRA adapter at a site, each ended exactly once."""
