#!/bin/sh
# Installs a release of `roll`: finds this machine's archive, downloads it, checks its SHA-256, and unpacks it into
# ~/.local. scripts/release writes the version and the address of its files into this script.
#
#     ROLL_DOWNLOADS    the address of the files instead
#     ROLL_PREFIX       a folder instead of ~/.local; gets bin/roll and share/
#
# A script that was downloaded in part does nothing: its last line calls the functions.
set -eu

version="@VERSION@"
downloads="${ROLL_DOWNLOADS:-@DOWNLOADS@}"

fail() {
    printf 'install.sh: %s\n' "$1" >&2
    exit 1
}

build="build it from a checkout instead, with Rust and a C++ compiler:
    cargo install --path roll-cli --locked"

has() { command -v "$1" >/dev/null 2>&1; }

target() {
    machine="$(uname -m)"
    case "$machine" in
    x86_64 | amd64) machine=x86_64 ;;
    aarch64 | arm64) machine=aarch64 ;;
    *) fail "no archive for the processor $machine, only for x86_64 and aarch64; $build" ;;
    esac
    case "$(uname -s)" in
    Linux)
        # `ldd --version` fails on musl, and names itself on the standard error.
        case "$(ldd --version 2>&1 || true)" in
        *musl*) fail "no archive for musl, only for glibc 2.17 and newer; $build" ;;
        esac
        echo "$machine-unknown-linux-gnu"
        ;;
    Darwin) echo "$machine-apple-darwin" ;;
    *) fail "no archive for $(uname -s), only for Linux and macOS; $build" ;;
    esac
}

# download NAME: into the current folder.
download() {
    if has curl; then
        curl --fail --silent --show-error --location --retry 3 --output "$1" "$downloads/$1"
    elif has wget; then
        wget --quiet --output-document="$1" "$downloads/$1"
    else
        fail "neither curl nor wget was found: install one of them"
    fi
}

sha256() {
    if has sha256sum; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d' ' -f1
}

main() {
    case "$downloads" in
    http*://* | file://*) ;;
    *) fail "expected the address of a release's files in ROLL_DOWNLOADS, found \"$downloads\"" ;;
    esac
    prefix="${ROLL_PREFIX:-${HOME:?set HOME or ROLL_PREFIX}/.local}"
    target="$(target)"
    name="roll-$version-$target"
    work="$(mktemp -d)"
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT TERM
    cd "$work"
    download "$name.tar.gz" || fail "no archive for $target could be downloaded: $downloads/$name.tar.gz; $build"
    download "$name.tar.gz.sha256" || fail "$name.tar.gz.sha256 could not be downloaded: nothing was installed"
    expected="$(cut -d' ' -f1 "$name.tar.gz.sha256")"
    found="$(sha256 "$name.tar.gz")"
    [ "$found" = "$expected" ] || fail "the SHA-256 of $name.tar.gz: expected $expected, found $found: the download is \
incomplete or was changed; nothing was installed"
    tar -xzf "$name.tar.gz"
    "$name/bin/roll" --version >/dev/null || fail "the program does not start on this machine; $build"
    mkdir -p "$prefix/bin" "$prefix/share"
    # A former demo would leave files that this version does not have.
    rm -rf "$prefix/share/roll/demo"
    cp -R "$name/share/." "$prefix/share/"
    # Renamed, since a program that runs cannot be written to.
    cp "$name/bin/roll" "$prefix/bin/.roll-$$"
    mv -f "$prefix/bin/.roll-$$" "$prefix/bin/roll"
    echo "roll $version was installed: $prefix/bin/roll"
    case ":${PATH:-}:" in
    *":$prefix/bin:"*) echo 'roll run                                         # the demo: one to two minutes' ;;
    *) echo "$prefix/bin is not in PATH. Add this line to the profile of your shell (~/.profile, ~/.zshrc):
    export PATH=\"$prefix/bin:\$PATH\"" ;;
    esac
}

main "$@"
