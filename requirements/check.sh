#!/bin/sh
# check.sh PYTHON: pip's check that each installed package has what it needs.
# xgrammar asks for triton on Linux; it uses it on a GPU only, where CUDA's build of torch brings it.
set -eu
! "$1" -m pip check | grep -vE '^(No broken requirements found\.|xgrammar .* requires triton, which is not installed\.)$'
