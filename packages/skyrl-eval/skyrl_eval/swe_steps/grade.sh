# The official steps of grading.
cd /testbed || exit 0
. /steps/apply.sh
[ -n "$applied" ] || { echo ">>>>> Patch Apply Failed"; exit 0; }
bash /eval/eval.sh
exit 0
