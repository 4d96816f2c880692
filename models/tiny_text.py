"""Tiny random text encoders of HunyuanVideo for models/tiny.py: Llama, Llava and CLIP, each with a real tokenizer."""

import re

# Llama-3's rule for cutting text into words.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BEGIN, END, PAD, IMAGE = "<|begin_of_text|>", "<|end_of_text|>", "<pad>", "<image>"
SPECIAL = [BEGIN, END, PAD, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", IMAGE]


def llama_tokenizer():
    """Byte-level BPE in Llama-3's shape. Every word of HunyuanVideo's templates is one token, as in the published
    vocabulary, so that what the pipelines cut off the text (95 and 103 tokens) is the template here too."""
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video as text_to_video
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video_image2video as image_to_video
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        min_frequency=1,
        show_progress=False,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    templates = [module.DEFAULT_PROMPT_TEMPLATE["template"] for module in (text_to_video, image_to_video)]
    between = re.compile("|".join(map(re.escape, [*SPECIAL, "{}"])))
    tokenizer.train_from_iterator([part for t in templates for part in between.split(t) if part], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        padding_side="right",
        model_max_length=1024,
    )


def llama_config(tokenizer, width: int):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=40,
        num_hidden_layers=4,  # the pipelines take the last but two
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def llama(tokenizer, width: int):
    from transformers import LlamaModel

    return LlamaModel(llama_config(tokenizer, width)).eval()


def llava(tokenizer, width: int):
    """Llama that sees an image as 24 x 24 = 576 tokens, as the published one."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=16,
        projection_dim=8,
        num_attention_heads=2,
        num_hidden_layers=2,
        image_size=336,
        patch_size=14,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=llama_config(tokenizer, width),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlavaForConditionalGeneration(config).eval()


def clip_tokenizer():
    """Every byte is a token; the end token has the largest id, as CLIP's pooling expects of some configs."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"{piece}</w>" for piece in pieces] + ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=77)


def clip(tokenizer, width: int):
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=16,
        projection_dim=width,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval()
