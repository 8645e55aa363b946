# An official image's tree, what is built in it too, under one commit of its own: the image's git knows later ones.
# A container's root makes it, and who is not root outside is to change it.
set -e; umask 0; cd /testbed; git ls-files -z | xargs -0 -r sh -c 'for f; do [ ! -e "$f" ] && [ ! -L "$f" ] || printf "%s\0" "$f"; done' sh > /tmp/files
cp -a . /out; cd /out; rm -rf .git; chmod -R a+rwX .; git init -q
git --literal-pathspecs add -f --pathspec-from-file=/tmp/files --pathspec-file-nul
git -c user.name=base -c user.email=base@base commit -qm base; git rev-parse HEAD
