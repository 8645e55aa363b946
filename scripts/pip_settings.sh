# Sourced: tells uv what pip was told about indexes, local wheels, proxies and certificates, which uv does not read.
# Needs $python, an interpreter whose pip is asked for its configuration; without pip only PIP_* variables count.

pip_configuration="$("$python" -m pip config list 2>/dev/null || true)" # `pip config get` reads one file only

pip_setting() { # NAME: PIP_NAME, else pip's configuration; several values are parted by single spaces
  local variable
  variable="PIP_$(tr 'a-z-' 'A-Z_' <<<"$1")"
  if [ -n "${!variable:-}" ]; then
    echo "${!variable}"
  else
    sed -nE "s/^(global|install)\.$1='(.*)'\$/\2/p" <<<"$pip_configuration" | tail -n 1 | sed 's/\\n/ /g'
  fi | xargs
}

pass_on() { # UV_VARIABLE VALUE: unless it is set already or there is nothing to pass on
  [ -n "${!1:-}" ] || [ -z "$2" ] || export "$1=$2"
}

pass_on UV_DEFAULT_INDEX "$(pip_setting index-url)"
pass_on UV_INDEX "$(pip_setting extra-index-url)"
pass_on UV_FIND_LINKS "$(pip_setting find-links | tr ' ' ',')"
pass_on UV_INSECURE_HOST "$(pip_setting trusted-host)"
pass_on HTTPS_PROXY "$(pip_setting proxy)"
pass_on HTTP_PROXY "$(pip_setting proxy)"
pass_on SSL_CERT_FILE "$(pip_setting cert)"
pass_on UV_INDEX_STRATEGY unsafe-best-match # as pip does: the best version of all indexes
pass_on UV_HTTP_TIMEOUT 180
