#!/bin/sh
# Creates the namespace and the search attributes that runs are listed by; repeated, it changes
# nothing but the retention. The temporal program reads the server from TEMPORAL_ADDRESS.
set -eu

namespace=${TEMPORAL_NAMESPACE:-default}
retention=${PERDURE_RETENTION:-720h}

attempts=30
until temporal operator cluster health >/dev/null 2>&1; do
  attempts=$((attempts - 1))
  if [ "$attempts" -le 0 ]; then
    echo "Temporal at ${TEMPORAL_ADDRESS:-its default address} is not healthy after a minute" >&2
    exit 1
  fi
  sleep 2
done

if temporal operator namespace describe --namespace "$namespace" >/dev/null 2>&1; then
  temporal operator namespace update --namespace "$namespace" --retention "$retention"
else
  temporal operator namespace create --namespace "$namespace" --retention "$retention"
fi

# A namespace is known to every part of the server after some seconds.
attempts=30
until known=$(temporal operator search-attribute list --namespace "$namespace" 2>/dev/null); do
  attempts=$((attempts - 1))
  if [ "$attempts" -le 0 ]; then
    echo "namespace $namespace is not there after a minute" >&2
    exit 1
  fi
  sleep 2
done

while read -r name kind; do
  case "$known" in
    *"$name"*) continue ;;
  esac
  temporal operator search-attribute create --namespace "$namespace" --name "$name" --type "$kind"
done <<ATTRIBUTES
RunState Keyword
PolicyVersion Int
UpdateIndex Int
ModelName Keyword
RecipeName Keyword
ATTRIBUTES
