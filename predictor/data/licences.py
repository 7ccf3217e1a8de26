"""Licences of public corpora and models, as their projects state them."""

LICENCES = {
    "alpaca": "Stanford Alpaca: CC BY-NC 4.0; the vicuna-7b lengths (Sequence-Scheduling): none stated",
    "alpaca_en_demo": "LLaMA-Factory, Apache-2.0; data of GPT-4-LLM, CC BY-NC 4.0",
    "alpaca_eval": "AlpacaEval, Apache-2.0; data CC BY-NC 4.0",
    "arena_bench_v1": "Arena-Hard, Apache-2.0",
    "arena_hard_1k": "FastChat, Apache-2.0; prompts CC BY 4.0, outputs CC BY-NC 4.0",
    "arena_hard_v0.1": "Arena-Hard, Apache-2.0",
    "arena_hard_v2.0": "Arena-Hard, Apache-2.0",
    "code_alpaca_2k": "Code Alpaca: CC BY-NC 4.0",
    "dolly_3k": "Databricks Dolly 15k: CC BY-SA 3.0",
    "flask": "FLASK: none stated, research use",
    "gpteacher_codegen": "GPTeacher: MIT",
    "gpteacher_roleplay": "GPTeacher: MIT",
    "gsm8k": "GSM8K, MIT; RouteLLM, Apache-2.0; ToRA, MIT",
    "mico": "Mico's own prompts, Apache-2.0; answers of SmolLM2-135M-Instruct, Apache-2.0",
    "mt_bench": "RouteLLM, Apache-2.0",
    "self_instruct_252": "Self-Instruct, Apache-2.0",
    "self_instruct_seed": "Stanford Alpaca, Apache-2.0",
    "smollm2": "prompts and answers of SmolLM2-135M-Instruct, Apache-2.0",
    "tulu_eval": "Open Instruct, Apache-2.0",
    "vicuna80": "FastChat, Apache-2.0",
}
MODEL_LICENCES = {"all-MiniLM-L6-v2": "Apache-2.0", "SmolLM2-135M-Instruct": "Apache-2.0"}
UNSTATED = "not stated"
FREE = frozenset(
    {
        "arena_bench_v1",
        "arena_hard_v0.1",
        "arena_hard_v2.0",
        "gpteacher_codegen",
        "gpteacher_roleplay",
        "gsm8k",
        "mico",
        "mt_bench",
        "self_instruct_252",
        "self_instruct_seed",
        "smollm2",
        "tulu_eval",
        "vicuna80",
    }
)
"""Corpora whose stated licences, MIT and Apache-2.0, allow any use. Shipped artifacts use only these."""
FREE_NOTE = "As their projects state it, every source's licence allows any use."
BOUND_NOTE = "Not every source is known to allow any use, so check the licences before commercial use."
