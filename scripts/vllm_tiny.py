"""Make a tiny language model on the spot, for a real vLLM without an accelerator or a download.

    python scripts/vllm_tiny.py OUT

Runs in the serving environment (torch, transformers, tokenizers). Writes a Qwen3 of two layers and
hidden size 128 with seeded random weights, and a byte-level BPE tokenizer with a chat template,
trained on the documentation that ships with Python. What it says is noise; that it runs through
the real scheduler, the real HTTP server and the real metrics is the point. The same Python and
libraries give the same files. Nothing is done if OUT already holds a finished model.
"""

import json
import sys
from pathlib import Path

VOCABULARY = 4096
CONTEXT = 8192
SEED = 0
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DONE = "capacity_tiny.json"


def make_tokenizer(out: Path) -> int:
    """Train and save the tokenizer; returns its number of tokens."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[key] for key in sorted(topics)), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    return len(fast)


def make_model(out: Path, tokens: int) -> None:
    """Save a model of that vocabulary with seeded random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=tokens,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(out)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    if (out / DONE).is_file():
        print(f"{out}: already there")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    tokens = make_tokenizer(out)
    make_model(out, tokens)
    (out / DONE).write_text(json.dumps({"tokens": tokens, "context": CONTEXT, "seed": SEED}) + "\n")
    print(f"{out}: a Qwen3 of {tokens} tokens, 2 layers, hidden 128")
    return 0


if __name__ == "__main__":
    sys.exit(main())
