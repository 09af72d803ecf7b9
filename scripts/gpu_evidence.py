from scripts.evidence import frame
from scripts.evidence.gpu.run import GpuArguments, measured, page, pictures

run, main = frame.benchmark("gpu_evidence", GpuArguments, measured, page, pictures, about=__doc__)

if __name__ == "__main__":
    main()
