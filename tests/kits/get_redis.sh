#!/bin/sh
# Puts a redis-server into the folder $1 (default .venv/redis) for the tests of the remote tier: Debian and
# Ubuntu packages are unpacked there, nothing is installed and no root is needed. Where that is not possible
# it says so and succeeds: those tests are then skipped.
target=${1:-.venv/redis}
command -v redis-server >/dev/null 2>&1 && exit 0
[ -x "$target/redis-server" ] && exit 0

fetch() {
    work=$(mktemp -d) && mkdir -p "$target" && target=$(cd "$target" && pwd) && cd "$work" || return 1
    apt-get download redis-server redis-tools >/dev/null 2>&1 || {
        [ "$(id -u)" = 0 ] && apt-get update -qq >/dev/null 2>&1
        apt-get download redis-server redis-tools >/dev/null 2>&1 || return 1
    }
    for package in liblzf1 libjemalloc2 libatomic1 liblua5.1-0 lua-cjson lua-bitop libhiredis1.1.0; do
        apt-get download "$package" >/dev/null 2>&1
    done
    for file in *.deb; do dpkg -x "$file" "$target/files" || return 1; done
    libraries=$(find "$target/files" -name '*.so*' -exec dirname {} \; | sort -u | paste -sd:)
    printf '#!/bin/sh\nLD_LIBRARY_PATH="%s" exec "%s" "$@"\n' \
        "$libraries" "$target/files/usr/bin/redis-server" >"$target/redis-server"
    chmod +x "$target/redis-server"
    "$target/redis-server" --version >/dev/null 2>&1 || { rm -f "$target/redis-server"; return 1; }
}

(fetch) || echo "No redis-server to be had here: the tests of the Redis tier will be skipped."
exit 0
