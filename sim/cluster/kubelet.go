package cluster

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// kubeletOptions is what the configurations of kubelets differ in.
type kubeletOptions struct {
	kubernetes   string
	cgroupRoot   string
	socket       string // of the container runtime
	taints       []corev1.Taint
	hasKernelLog bool
}

// kubeletConfig renders a node's KubeletConfiguration. The kubelet retries a
// prepare that failed with its periodic sync only: after 10 to 15 seconds with
// this syncFrequency, after 60 to 90 with its default.
func kubeletConfig(o kubeletOptions) string {
	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication:
  anonymous:
    enabled: false
  webhook:
    enabled: true
  x509:
    clientCAFile: %[1]s/ca.crt
authorization:
  mode: Webhook
tlsCertFile: %[1]s/kubelet.crt
tlsPrivateKeyFile: %[1]s/kubelet.key
containerRuntimeEndpoint: unix://%[2]s
cgroupDriver: cgroupfs
cgroupRoot: %[3]s
clusterDNS: [%[4]s]
clusterDomain: cluster.local
resolvConf: ""
enforceNodeAllocatable: []
evictionHard: {}
failSwapOn: false
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
maxPods: 250
oomScoreAdj: 0
serializeImagePulls: false
syncFrequency: 10s
`, configDir, o.socket, o.cgroupRoot, dnsIP)
	var gates []string
	minor := minorVersion(o.kubernetes)
	// Newer kubelets refuse cgroup v1 without this.
	if minor >= 35 {
		b.WriteString("failCgroupV1: false\n")
	}
	// A container that crashed is started again after two seconds, each time, and
	// not after 10 s to 5 min.
	if minor >= 32 {
		b.WriteString("crashLoopBackOff:\n  maxContainerRestartPeriod: 2s\n")
	}
	if minor >= 32 && minor < 35 {
		gates = append(gates, "KubeletCrashLoopBackOffMax")
	}
	// The kubelet stops when it can't watch the kernel log for killed
	// processes, unless it believes itself without privileges.
	if !o.hasKernelLog {
		gates = append(gates, "KubeletInUserNamespace")
	}
	if len(gates) > 0 {
		fmt.Fprintf(&b, "featureGates:\n  %s: true\n", strings.Join(gates, ": true\n  "))
	}
	b.WriteString(registerWithTaints(o.taints))
	return b.String()
}

// registerWithTaints renders the taints that a node has from the beginning.
func registerWithTaints(taints []corev1.Taint) string {
	if len(taints) == 0 {
		return ""
	}
	text, err := yaml.Marshal(map[string]any{"registerWithTaints": taints})
	if err != nil {
		panic(err) // strings only
	}
	return string(text)
}
