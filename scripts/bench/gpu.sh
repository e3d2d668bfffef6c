#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in order: correctness first, then the measurements behind the pages. gpu.sh OUT [STEP ...]
# Runs from a clean checkout without installing it; results land in OUT. Set TURBOQUANT_COMMIT and TURBOQUANT_DIRTY where there is no git.
set -u
out=$1
shift
steps=${*:-tests decode tune generate}
mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
workers=$(($(nproc) - 1))
failed=0

step() { # name, then the command
    local begin=$SECONDS name=$1
    shift
    if "$@" > "$out/$name.log" 2>&1; then said=ok; else said=FAILED failed=1; fi
    echo "$name: $said, $((SECONDS - begin)) s"
    tail -n 4 "$out/$name.log"
}

for name in $steps; do
    case $name in
        tests)
            step decode-tests python -m pytest -q -n "$workers" tests/kernels/test_decode_kernel.py
            step cuda-tests python -m pytest -q tests/kernels/test_cuda.py tests/kernels/test_encode_kernel.py tests/kernels/test_ops.py tests/hf/test_hf_kernels.py tests/hf/test_hf_static.py
            ;;
        decode) step decode python scripts/run.py decode_kernel --workers "$workers" --seconds 0.04 --out "$out/decode.json" ;;
        tune) step tune python scripts/tools/tune.py --workers "$workers" --write --out "$out/tune.json" && cp turboquant_nb/configs/decode.json "$out/" ;;
        generate) step generate python scripts/run.py generate --out "$out/generate.json" ;;
        wall) step wall python scripts/run.py generate --wall 1x8192 8x8192 8x32768 --out "$out/wall.json" ;;
        memcheck | racecheck)
            # Without PyTorch's memory cache each tensor is an allocation of its own, and no graph can be captured. torch's own flash attention writes beside a tensor.
            step "$name" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$name" --error-exitcode 9 --kernel-regex-exclude kns=flash python -m pytest -q tests/kernels/test_decode_kernel.py tests/kernels/test_blocks.py tests/kernels/test_cells.py tests/kernels/test_encode_kernel.py -k "not graph and not compile and not long"
            ;;
        *)
            echo "unknown step $name: tests, decode, tune, generate, wall, memcheck, racecheck" >&2
            exit 2
            ;;
    esac
done
exit $failed
