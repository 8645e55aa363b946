# The official steps of grading.
cd /testbed || exit 0
. /steps/apply.sh
[ -n "$applied" ] || git apply --check --reverse /eval/patch.diff || { echo ">>>>> Patch Apply Failed"; exit 0; }
bash /eval/eval.sh
exit 0
