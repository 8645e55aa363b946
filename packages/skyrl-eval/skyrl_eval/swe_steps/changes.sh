# What a patch changes, by a git of our own, into /out (swe_guard.split reads it).
. /opt/miniconda3/bin/activate testbed 2> /dev/null; cd / || exit 1
python -I > /out/modules <<< '
import pkgutil
print(*[name for place, name, _ in pkgutil.iter_modules() if "/testbed" not in str(place)])'
own() { git --git-dir=/tmp/own/.git --work-tree=/testbed "$@"; }
# -f, for a patch can say what git ignores; and a nested .git would hide the folder around it.
tree() { find . -mindepth 2 -name .git -prune -exec rm -rf {} +; own add -Af . && own write-tree; }
git init -q /tmp/own; cd /testbed && before=$(tree) || exit 1
. /steps/apply.sh
after=$(tree) || exit 3  # what git does not take is the patch's fault
own ls-tree -r -z --name-only $after > /out/files &&
own diff-tree -r -z --no-renames $before $after > /out/changes &&
own diff-tree -p --binary --no-renames $before $after > /out/patch
