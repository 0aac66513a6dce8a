"""Known errors of rows, tokenizers and models, and of TRL's trainers: see errors.py."""

from __future__ import annotations

from shardproof.doctor.known.kind import Known

ROWS = (
    Known(
        "files and their marks",
        "transformers, models that see or hear",
        (
            r"(image|video|audio) features and (image|video|audio) tokens do not match",
            r"mismatch in `?(image|video|audio)`? token count between text and",
        ),
        "The number of placeholder tokens for an image or audio file differs from the number of features of its tower.",
        "The row was cut in the middle of an image, it has more or fewer files than placeholders, or the processor and"
        " the model come from different releases.",
        "A larger maximum length (cutoff_len, max_length); one placeholder per file; the model's own processor.",
        "Every row goes through the processor before training, and one that does not fit is named by file and line."
        " Rows with files are never cut: those that are too long are left out.",
        (
            "QwenLM/Qwen3-VL#556",
            "2U1/Qwen-VL-Series-Finetune#128",
            "hiyouga/LlamaFactory#6559",
            "unslothai/unsloth#2251",
        ),
    ),
    Known(
        "rows of different lengths in a batch",
        "transformers",
        (r"unable to create tensor, you should probably activate truncation and/or padding",),
        "Rows of a batch could not be put into one tensor.",
        "Labels, or a column that is not a list of numbers, were not padded: DataCollatorWithPadding and the collator"
        " for language modelling pad inputs, not labels.",
        "A collator that pads labels (DataCollatorForSeq2Seq); remove text columns.",
        "`sft` pads tokens and labels alike, and other columns never reach the collator.",
        (
            "huggingface/transformers#39266",
            "huggingface/transformers#20638",
            "mosaicml/llm-foundry#213",
            "cckuailong/SuperAdapters#2",
        ),
    ),
    Known(
        "no chat template",
        "transformers, TRL",
        (
            r"tokenizer\.chat_template is not set",
            r"cannot use (chat template functions|apply_chat_template\(?\)?) because",
        ),
        "Rows are conversations, and the tokenizer does not know how to write one.",
        "Base models have no template, and transformers has had no default one since 4.44.",
        "The instruct model's tokenizer, or your own tokenizer.chat_template (TRL: clone_chat_template).",
        "--chat-template chatml, a file, or the text of a template. It is checked before the model is loaded.",
        (
            "huggingface/transformers#33246",
            "OpenRLHF/OpenRLHF#613",
            "huggingface/open-r1#85",
            "unslothai/unsloth#2096",
        ),
    ),
    Known(
        "a tokenizer that is newer than tokenizers",
        "tokenizers, transformers",
        (r"did not match any variant of untagged enum",),
        "tokenizer.json is written in a form that the installed library cannot read.",
        "It was saved by a newer release of tokenizers than the one reading it, or it is damaged.",
        "pip install -U transformers tokenizers (they go together).",
        "`shardproof doctor` compares the releases, and reads the tokenizer before the model.",
        (
            "huggingface/transformers#31789",
            "huggingface/tokenizers#1297",
            "allenai/open-instruct#738",
            "chatchat-space/Langchain-Chatchat#3910",
        ),
    ),
    Known(
        "a model that is newer than transformers",
        "transformers",
        (r"but transformers does not recognize this architecture",),
        "config.json names a kind of model that the installed transformers does not have.",
        "The model is newer than the release; or it brings its own code, which was not allowed to run.",
        "pip install -U transformers; trust_remote_code=True for a model with its own code, after reading it.",
        "The same, but reported before loading; --trust-remote-code, or a class of your own in --external-plugins.",
        ("vllm-project/vllm#15685", "QwenLM/Qwen3-VL#62", "hiyouga/LlamaFactory#9178"),
    ),
    Known(
        "a file that holds no weights",
        "transformers, safetensors",
        (r"error while deserializing header", r"HeaderTooLarge", r"MetadataIncompleteBuffer"),
        "A .safetensors file does not start with a valid header.",
        "It is a Git LFS pointer (a few lines of text), an HTML page, or an incomplete download.",
        "Check its size; git lfs pull, or download it again.",
        "A pointer or an incomplete file is named before anything is loaded.",
        (
            "OpenBMB/MiniCPM-V#159",
            "eosphoros-ai/DB-GPT#314",
            "huggingface/diffusers#5520",
            "wangshuai67/hf-mirror-cli#16",
        ),
    ),
    Known(
        "weights of another shape",
        "transformers, PEFT",
        (
            r"size mismatch for [^\n]*copying a param with shape torch\.size\(\[(?!0\])[^\]]*\]\)"
            r"(?! from checkpoint, the shape in current model is torch\.size\(\[0\]\))",
        ),
        "A weight has a different shape in the file than in the model.",
        "Tokens were added (a pad token, those of a template) and the embedding grew in only one of the two; or the"
        " adapter belongs to another model, or to another size of it.",
        "resize_token_embeddings to the shape in the file before it is loaded; the model that the adapter was trained"
        " on.",
        "`shardproof doctor` names weights whose shapes differ; an embedding is never resized without being asked.",
        (
            "hiyouga/LlamaFactory#3125",
            "huggingface/peft#1554",
            "huggingface/peft#2415",
            "yxli2123/LoftQ#27",
        ),
    ),
    Known(
        "tensors that share memory",
        "safetensors, transformers",
        (r"some tensors share memory, this will lead to duplicate memory on disk",),
        "A state dict holds the same memory under two names, and a safetensors file holds each tensor once.",
        "Weights are tied (the head is the embedding), and the code that saves them does not know: Trainer with a model"
        " that is not a PreTrainedModel (a wrapper, a value head), accelerator.save_state, save_file of a plain state"
        " dict. If the names listed are unrelated, they are views of one flat buffer, or empty: the weights were"
        " not gathered (inferred).",
        "save_pretrained of the model itself, which leaves the second name out (for a class of your own:"
        " _tied_weights_keys); safetensors.torch.save_model; clone() one of the two; in older releases of transformers"
        " save_safetensors=False.",
        "`sft` and `rlhf` write tied weights once, as save_pretrained does, read them back and compare; loading ties"
        " them again.",
        (
            "safetensors/safetensors#98",
            "huggingface/trl#5150",
            "hiyouga/LlamaFactory#10137",
            "NVIDIA-NeMo/Megatron-Bridge#919",
        ),
        ("tied_weights",),
    ),
    Known(
        "two dtypes in one operation",
        "all",
        (
            r"expected scalar type (float|half|bfloat16|double) but found (float|half|bfloat16|double)",
            r"(mat1 and mat2|m1 and m2) (must|to) have the same dtype",
        ),
        "An operation met tensors of two dtypes.",
        "Part of the model is in half precision and part is not (adapters, norms, a tower, a newly created head),"
        " and autocast is not active there.",
        "One dtype for all of it, or bf16=True / autocast around it; adapters as the library creates them.",
        "A unit and its adapters compute in --precision and keep fp32 master weights.",
        (
            "haotian-liu/LLaVA#774",
            "haotian-liu/LLaVA#785",
            "unslothai/unsloth#212",
            "hiyouga/LlamaFactory#724",
        ),
    ),
    Known(
        "FlashAttention in fp32",
        "all, with FlashAttention",
        (r"flashattention only supports? fp16 and bf16",),
        "FlashAttention was given tensors in fp32.",
        "The model computes in fp32: no mixed precision was chosen, or a norm or an adapter in front gives fp32.",
        "bf16=True (or fp16) in the trainer; load the model in bf16; sdpa where fp32 is intended.",
        "--precision bf16 or fp16 with --attn flash_attention_2, or --attn sdpa.",
        ("unslothai/unsloth#827", "QwenLM/Qwen3#406", "yangjianxin1/Firefly#259", "ali-vilab/UniAnimate-DiT#40"),
    ),
    Known(
        "a quantised model without adapters",
        "transformers, PEFT",
        (r"cannot perform fine-tuning on purely quantized models",),
        "Full training was requested for a model whose weights are packed into 4 or 8 bits.",
        "No adapters were added, or they were merged before.",
        "get_peft_model with LoRA on top; or load the model unpacked.",
        "The same: --tuner lora, with --quantize or a folder that is packed already. Packed weights are sharded,"
        " gathered and released like others.",
        ("unslothai/unsloth#1110", "unslothai/unsloth#241", "AGI-Edgerunners/LLM-Adapters#57", "BAAI-DCAI/Bunny#112"),
    ),
    Known(
        "no gradient under a loss scale",
        "all, with fp16",
        (r"no inf checks were recorded",),
        "The loss is scaled for fp16, and no parameter of the optimizer has a gradient.",
        "What is trained is frozen, is not part of the loss, or belongs to another model than the optimizer.",
        "Look at which parameters have requires_grad and a gradient after backward.",
        "`shardproof doctor` names what is frozen unasked, and what gets no gradient in its trial.",
        (
            "huggingface/transformers#24003",
            "huggingface/accelerate#328",
            "hiyouga/ChatGLM-Efficient-Tuning#34",
            "SheldonTsui/GOF_NeurIPS2021#2",
        ),
    ),
    Known(
        "no loss",
        "transformers' Trainer",
        (r"the model did not return a loss from the inputs",),
        "The model gave logits and no loss.",
        "Rows have no `labels`: the collator or remove_unused_columns dropped them, or the model knows them by another"
        " name.",
        "A collator that makes labels; remove_unused_columns=False; label_names.",
        "`sft` makes labels itself; for a model without a loss of its own, --loss names one of a plugin.",
        (
            "huggingface/transformers#34392",
            "unslothai/unsloth#1899",
            "princeton-nlp/MeZO#19",
            "OptimalScale/LMFlow#380",
        ),
    ),
    Known(
        "an argument that was renamed",
        "transformers, TRL",
        (
            r"got an unexpected keyword argument '(tokenizer|processing_class|max_seq_length|dataset_text_field"
            r"|evaluation_strategy|max_prompt_length|dataset_kwargs|no_cuda|overwrite_output_dir|group_by_length)'",
        ),
        "The program was written for another release of transformers or TRL.",
        "Arguments of the trainers were renamed or moved to their configs: tokenizer is processing_class,"
        " evaluation_strategy is eval_strategy, max_seq_length is max_length of SFTConfig.",
        "The new name, or the release that the program was written for.",
        "Options of `sft` and `rlhf` keep their names; the releases below are in constraints.txt.",
        ("huggingface/trl#6168", "huggingface/trl#2968", "huggingface/peft#2400", "tulerfeng/Video-R1#14"),
    ),
    Known(
        "answers that do not divide the batch",
        "TRL's GRPO and RLOO",
        (
            r"must be (evenly )?divisible by the number of generations",
            r"generation_batch_size \(\d+\) must be divisible by num_generations",
        ),
        "The batch that is generated at once is not a multiple of the answers per prompt.",
        "A batch counts answers, not prompts: processes x batch size x accumulation must be a multiple of"
        " num_generations, which is at least two.",
        "Another num_generations, batch size or accumulation; a GPU that only generates does not count.",
        "If you set no size, one that --num-generations divides is chosen.",
        (
            "huggingface/trl#2858",
            "huggingface/trl#3061",
            "huggingface/open-r1#249",
            "modelscope/ms-swift#3980",
        ),
    ),
)
