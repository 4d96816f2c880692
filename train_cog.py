"""accelerate launch train_cog.py --config configs/cog/5b_lora.yaml --data.train clips/ --output_dir runs/my-style"""

from trainers.cog import CogVideoXTrainer

if __name__ == "__main__":
    CogVideoXTrainer.main(description=__doc__)
