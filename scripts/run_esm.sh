#!/usr/bin/env bash
# Everything of 85_proteins on one GPU: run_esm.sh bench|eval OUT [FOLDER]. `bench` takes about 80 s and wants the GPU for itself; `eval` about 140 s.
# FOLDER (default esm-data) holds esm2-8m/ (a transformers checkpoint of ESM-2 8M) and chains.json, made once by
# `python scripts/eval_esm.py chains --scope FOLDER_OF_SIDECHAINNET --chains FOLDER/chains.json`. Results go to OUT/*.json; copy them to results/esm/NAME-h200.json.
set -u
out=$2 folder=${3:-esm-data}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
mkdir -p "$out"
if [ "$1" = bench ]; then
  timeout 140 python scripts/bench_esm.py --out "$out/bench.json" > "$out/bench.log" 2>&1
else
  run() { timeout 145 python scripts/eval_esm.py "$@" --model "$folder/esm2-8m" --chains "$folder/chains.json"; }
  run variants --out "$out/variants.json" > "$out/variants.log" 2>&1 &
  run contacts --out "$out/contacts.json" > "$out/contacts.log" 2>&1 &
  run findings --out "$out/findings.json" > "$out/findings.log" 2>&1 &
  run recipes --match '^(turbo|rotation|data)' --out "$out/recipes1.json" > "$out/recipes1.log" 2>&1 &
  run recipes --match '^water' --out "$out/recipes2.json" > "$out/recipes2.log" 2>&1 &
  wait
fi
tail -n 2 "$out"/*.log | cut -c1-400
