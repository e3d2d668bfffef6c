#!/usr/bin/env bash
# Everything of 93_proteins on one GPU: proteins.sh bench|eval OUT [FOLDER [GGUF]]. `bench` takes about two minutes and wants the GPU for itself; `eval` some minutes, in eight
# processes. FOLDER (default esm-data) holds esm2-8m/ (a transformers checkpoint of ESM-2 8M) and chains.json, made once by
# `python scripts/eval/proteins.py chains --scope FOLDER_OF_SIDECHAINNET --chains FOLDER/chains.json`; GGUF is SmolLM2-135M-Instruct's, for outliers.
# Results go to OUT/*.json; copy them to results/esm/NAME-h200.json.
set -u
out=$2 folder=${3:-esm-data} lm=${4:-embedded}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
mkdir -p "$out"
if [ "$1" = bench ]; then
  timeout 200 python scripts/bench/run.py proteins --out "$out/bench.json" > "$out/bench.log" 2>&1
  timeout 100 python scripts/bench/run.py proteins_masked --out "$out/masked.json" > "$out/masked.log" 2>&1
else
  run() { # a file, then what proteins.py takes
    name=$1
    shift
    timeout "${SECONDS_EACH:-500}" python scripts/eval/proteins.py "$@" --model "$folder/esm2-8m" --chains "$folder/chains.json" --out "$out/$name.json" > "$out/$name.log" 2>&1 &
  }
  run recipes1 recipes --match '^turbo'
  run recipes2 recipes --match '^(rotation|data|INT|water[24]|water3$|water3, strays)'
  run recipes3 recipes --match '^water3, [^s]'
  run findings1 findings --match calibration
  run findings2 findings --match 'layers|outliers|tables|strays' --lm "$lm"
  run contacts contacts
  run variants variants
  run scores scores
  wait
  python scripts/eval/proteins.py recipes --join "$out"/recipes?.json --out "$out/recipes.json"
  python scripts/eval/proteins.py findings --join "$out"/findings?.json --out "$out/findings.json"
fi
tail -n 2 "$out"/*.log | cut -c1-400
