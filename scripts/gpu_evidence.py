"""Measure on a CUDA device what the documents claim of one, in parts of at most eight minutes:

    python -m scripts.gpu_evidence part=check|host|exact|abn|networks|steps|fit|train|ranks out=DIR [only=[…]]
    python -m scripts.gpu_evidence part=train camvid=DIR out=DIR
    python -m scripts.gpu_evidence part=abn rehearse=true out=DIR   # on a CPU, to see that every line runs
    python -m scripts.gpu_evidence part=abn measure=false out=DIR   # page and picture from the record, without a GPU

DIR/gpu_PART.json is written again after each item; the same command adds what is missing. docs/reproducing.md lists the
parts in order, with the minutes that they should take.
"""

from scripts.evidence import frame
from scripts.evidence.gpu.run import GpuArguments, measured, page, pictures

run, main = frame.benchmark("gpu_evidence", GpuArguments, measured, page, pictures, about=__doc__)

if __name__ == "__main__":
    main()
