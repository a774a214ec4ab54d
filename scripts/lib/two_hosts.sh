# Two hosts on this machine, joined by one throttled link: network namespaces and a token bucket. Sourced after
# common.sh; needs root, ip and tc.
#
#   two_hosts_up MBIT           makes them; two_hosts_down removes them (also on exit)
#   two_hosts_mpiexec N CMD...  runs N ranks, the first half on one host, the rest on the other, over TCP
HOSTS_PREFIX=strata$$

two_hosts_down() {
  ip netns del "${HOSTS_PREFIX}a" 2>/dev/null || true
  ip netns del "${HOSTS_PREFIX}b" 2>/dev/null || true
  [ -z "${HOSTS_FOLDER:-}" ] || rm -rf "$HOSTS_FOLDER"
}

two_hosts_up() {
  local mbit=$1 side number=0
  [ "$(id -u)" -eq 0 ] || die "network namespaces need root -> run this as root"
  command -v tc >/dev/null || die "no tc -> apt-get install iproute2"
  trap two_hosts_down EXIT
  HOSTS_FOLDER=$(mktemp -d)
  ip netns add "${HOSTS_PREFIX}a"
  ip netns add "${HOSTS_PREFIX}b"
  ip link add link0 netns "${HOSTS_PREFIX}a" type veth peer name link0 netns "${HOSTS_PREFIX}b"
  for side in a b; do
    number=$((number + 1))
    ip -n "$HOSTS_PREFIX$side" addr add "10.77.0.$number/24" dev link0
    ip -n "$HOSTS_PREFIX$side" link set lo up
    ip -n "$HOSTS_PREFIX$side" link set link0 up
    tc -n "$HOSTS_PREFIX$side" qdisc add dev link0 root tbf rate "${mbit}mbit" burst 128kb latency 100ms
  done
  for side in a b; do  # the kernel takes a moment to call a link up
    until ip -n "$HOSTS_PREFIX$side" -br link show link0 | grep -q ' UP '; do sleep 0.1; done
  done
  # What hydra takes for ssh: [options] HOST COMMAND...
  cat >"$HOSTS_FOLDER/launch" <<EOF
#!/bin/bash
while [[ \$1 == -* ]]; do shift; done
host=\$1; shift
case "\$host" in 10.77.0.1) side=a ;; *) side=b ;; esac
exec ip netns exec $HOSTS_PREFIX\$side unshare -i sh -c "\$*"
EOF
  chmod +x "$HOSTS_FOLDER/launch"
}

two_hosts_mpiexec() {
  local ranks=$1
  shift
  printf '10.77.0.1:%d\n10.77.0.2:%d\n' $((ranks / 2)) $((ranks - ranks / 2)) >"$HOSTS_FOLDER/hosts"
  ip netns exec "${HOSTS_PREFIX}a" unshare -i mpiexec -iface link0 -launcher ssh -launcher-exec "$HOSTS_FOLDER/launch" \
    -f "$HOSTS_FOLDER/hosts" -n "$ranks" -genv UCX_TLS tcp,self -genv UCX_NET_DEVICES link0 "$@"
}
