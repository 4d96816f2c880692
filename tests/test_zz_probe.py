import time, sys
from runs import run
def test_a(tiny_ltx, clips, tmp_path):
    for i in range(3):
        t=time.time()
        r=run(tiny_ltx, clips, tmp_path/"a", stage="precompute")
        print("took", time.time()-t)
    t=time.time()
    r=run(tiny_ltx, clips, tmp_path/"a", stage="train")
    print("train took", time.time()-t)
    import os
    os.system(f"find {tmp_path/'a'} -type f | head -50")
