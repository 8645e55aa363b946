# The official ways of applying a patch, one after the other; sets $applied.
for apply in "git apply --verbose" "git apply --verbose --3way" "git apply --verbose --reject" \
    "patch --batch --forward --fuzz=5 -p1 -i"; do
  if $apply /eval/patch.diff; then applied=yes; break; fi
  [ "${apply%% *}" = patch ] || { git checkout -- . ; git clean -fd; }
done
# The last may fail and have applied it all: a part of it was there before.
[ -n "$applied" ] || if git apply --check --reverse /eval/patch.diff; then applied=yes; else git checkout -- . ; git clean -fd; fi
