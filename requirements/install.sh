#!/usr/bin/env bash
# install.sh PYTHON LOCK: installs a lock, and shows which of how many packages pip is at.
# The locks are complete (docs/security.md): pip resolves nothing, builds none of them, takes no file without its hash.
# pip compiles nothing, as most modules of torch and transformers are never imported: the Makefile does.
set -euo pipefail

name=$(basename "$2" .txt) total=$(grep -c == "$2") at=0 end='\n'
if [ -t 1 ]; then end='\r'; fi

show() { printf "%s: %d of %d: %-70.70s$end" "$name" "$at" "$total" "$1"; }

PYTHONUNBUFFERED=1 "$1" -m pip install --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
	--no-compile --progress-bar off -r "$2" | {
	while read -r verb what more; do
		case $verb in
		Collecting) at=$((at + 1)) && show "$what" ;;
		Processing) at=$((at + 1)) && show "${what##*/}" ;;
		Ignoring | Requirement) at=$((at + 1)) ;;
		Downloading) show "$what $more" ;;
		Installing) show unpacking ;;
		esac
	done
	if [ "$end" = '\r' ]; then echo; fi
}
