# An official image's tree, what is built in it too, under one commit of its own: the image's git knows later ones.
set -e; cd /testbed; git ls-files -z > /tmp/files; cp -a . /out; cd /out; rm -rf .git; git init -q
git add -f --pathspec-from-file=/tmp/files --pathspec-file-nul
git -c user.name=base -c user.email=base@base commit -qm base; git rev-parse HEAD
