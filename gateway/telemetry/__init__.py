"""What the gateway says about itself while it runs."""
