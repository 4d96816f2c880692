from setuptools import setup

# Lower bounds are the tested versions (constraints.txt), upper bounds the next version that may break what is used:
# the next minor one below 1.0, the next major one above.
REQUIRES = [
    "torch>=2.13,<3",
    "diffusers>=0.42.1,<0.43",
    "transformers>=5.24,<6",
    "peft>=0.21.2,<0.22",
    "accelerate>=1.15,<2",
    "safetensors>=0.8,<0.9",
    "huggingface_hub>=2.4,<3",
    "bitsandbytes>=0.50.2,<0.51",
    "torchao>=0.18,<0.19",
    "wandb>=0.31,<0.32",
    "tensorboard>=2.21,<3",
    "tyro>=1.0.17,<2",
    "PyYAML>=6.0.3,<7",
    "fsspec>=2026.9,<2027",
    "av>=18,<19",
    "Pillow>=13,<14",
    "numpy>=2.4,<3",
    "tqdm>=4.70,<5",
    "ftfy>=6.3,<7",
    "sentencepiece>=0.2.3,<0.3",
]
DATA = ["pyarrow>=26.0.1,<27"]
DEEPSPEED = ["deepspeed>=0.19.8,<0.20"]
OPTIMIZERS = [
    "came-pytorch>=0.1.3,<0.2",
    "prodigyopt>=1.1.2,<2",
    "schedulefree>=1.4.1,<2",
    "torch-optimi>=0.3.3,<0.4",
]

setup(
    name="reeltune",
    version="0.1.0",
    description="Fine-tune video diffusion models, LoRA or full, on one GPU or many nodes",
    license="Apache-2.0",
    python_requires=">=3.11",  # diffusers, transformers, av and numpy of these ranges need it
    packages=["trainers", "models", "data"],
    install_requires=REQUIRES,
    extras_require={
        "data": DATA,
        "deepspeed": DEEPSPEED,
        "optimizers": OPTIMIZERS,
        "dev": [*DATA, *DEEPSPEED, *OPTIMIZERS, "hypothesis>=6.170,<7", "pytest>=9.2,<10", "ruff>=0.17.6,<0.18"],
    },
)
