"""accelerate launch train_ltx.py --config configs/ltx/2b_lora.yaml --data.train clips/ --output_dir runs/my-style"""

from trainers.ltx import LTXTrainer

if __name__ == "__main__":
    LTXTrainer.main(description=__doc__)
