# The official ways of applying a patch, one after the other; sets $applied.
for apply in "git apply --verbose" "git apply --verbose --3way" "git apply --verbose --reject" \
    "patch --batch --forward --fuzz=5 -p1 -i"; do
  if $apply /eval/patch.diff; then applied=yes; break; fi
  git checkout -- . ; git clean -fd
done
