"""accelerate launch train_hunyuan.py --config configs/hunyuan/lora.yaml --data.train clips/ --output_dir runs/mine"""

from trainers.hunyuan import HunyuanVideoTrainer

if __name__ == "__main__":
    HunyuanVideoTrainer.main(description=__doc__)
