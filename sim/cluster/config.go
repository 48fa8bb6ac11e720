package cluster

import (
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/sim/cluster/machine"
)

// Paths inside the machines.
const (
	configDir    = machine.StateDir + "/config"
	etcdAddress  = "127.0.0.1:2379"
	searchPath   = machine.BinDir + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	auditLogName = "audit.log"
	frontProxy   = "front-proxy-client"
	pauseImage   = "localhost/tessera/pause:local"
)

// volatileDirs are the directories of every machine that start empty whenever
// it is switched on.
func volatileDirs() []string { return []string{"/run", "/tmp"} }

// controlPlaneDirs are all the directories that a control plane has for itself.
func controlPlaneDirs() []string { return append(volatileDirs(), "/var/lib/etcd") }

// hostRunDirs are the places in /run where the services of a real NVIDIA
// driver listen.
func hostRunDirs() []string {
	return []string{"/run/nvidia-persistenced", "/run/nvidia-fabricmanager", "/run/nvidia-topologyd"}
}

// maskedSysctls are the host-wide settings that a kubelet insists on.
func maskedSysctls() map[string]string {
	return map[string]string{
		"vm/overcommit_memory":      "1",
		"vm/panic_on_oom":           "0",
		"kernel/panic":              "10",
		"kernel/panic_on_oops":      "1",
		"kernel/keys/root_maxkeys":  "1000000",
		"kernel/keys/root_maxbytes": "25000000",
	}
}

// fewerCollections has Go collect garbage when the heap is five times as large as what
// lives in it: by default Kubernetes' programs spend a tenth of their processor time
// on garbage, and the API server a sixth.
const fewerCollections = "GOGC=400"

// fewerThreads returns the environment variable that limits a Go program to a quarter of the
// processors, at least one. A cluster has many programs; with more processors each has more
// threads, which take processor time to look for work and to wake each other.
func fewerThreads() string { return fmt.Sprintf("GOMAXPROCS=%d", max(1, runtime.NumCPU()/4)) }

func (c *Cluster) controlPlaneSpec() machine.Spec {
	env := []string{"PATH=" + searchPath, fewerCollections, fewerThreads()}
	spec := c.newSpec(controlPlane, c.binDir(), controlPlaneDirs())
	spec.Components = []machine.Component{
		{Name: "etcd", Args: etcdArgs(), Env: env},
		{Name: "kube-apiserver", Args: c.apiserverArgs(), Env: env, WaitFor: []string{"tcp://" + etcdAddress}},
		{Name: "kube-controller-manager", Args: c.controllerManagerArgs(), Env: env, WaitFor: []string{c.apiserverDial()}},
		{Name: "kube-scheduler", Args: c.schedulerArgs(), Env: env, WaitFor: []string{c.apiserverDial()}},
	}
	return spec
}

func (c *Cluster) newSpec(name, bin string, dirs []string) machine.Spec {
	return machine.Spec{
		Name:       name,
		State:      c.machineDir(name),
		Bin:        bin,
		Dirs:       dirs,
		HiddenDirs: []string{stateRoot, "/var/lib/docker"},
	}
}

func program(name string) string { return machine.BinDir + "/" + name }

func (c *Cluster) apiserverDial() string {
	return fmt.Sprintf("tcp://%s:%d", c.plan.apiserverAddress(), apiserverPort)
}

const unsafeNoSync = "--unsafe-no-fsync"

func etcdArgs() []string {
	return []string{
		program("etcd"), "--name=etcd", "--data-dir=/var/lib/etcd/data",
		"--listen-client-urls=http://" + etcdAddress, "--advertise-client-urls=http://" + etcdAddress,
		"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
		"--initial-cluster=etcd=http://127.0.0.1:2380",
		// A test cluster does not have to survive a power cut.
		unsafeNoSync,
	}
}

func (c *Cluster) apiserverArgs() []string {
	args := []string{
		program("kube-apiserver"),
		"--etcd-servers=http://" + etcdAddress,
		"--bind-address=0.0.0.0",
		fmt.Sprintf("--secure-port=%d", apiserverPort),
		"--advertise-address=" + c.plan.apiserverAddress().String(),
		"--service-cluster-ip-range=" + serviceCIDR,
		// Nothing serves cluster IPs: webhooks are called at the addresses of their pods.
		"--enable-aggregator-routing=true",
		"--allow-privileged=true",
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--client-ca-file=" + configDir + "/ca.crt",
		"--tls-cert-file=" + configDir + "/apiserver.crt",
		"--tls-private-key-file=" + configDir + "/apiserver.key",
		"--kubelet-certificate-authority=" + configDir + "/ca.crt",
		"--kubelet-client-certificate=" + configDir + "/kubelet-client.crt",
		"--kubelet-client-key=" + configDir + "/kubelet-client.key",
		"--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + configDir + "/service-account.pub",
		"--service-account-signing-key-file=" + configDir + "/service-account.key",
		// Aggregated API servers know the API server by a certificate of another CA
		// than users have.
		"--requestheader-client-ca-file=" + configDir + "/front-proxy-ca.crt",
		"--requestheader-allowed-names=" + frontProxy,
		"--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file=" + configDir + "/front-proxy.crt",
		"--proxy-client-key-file=" + configDir + "/front-proxy.key",
		// These and webhooks are called at their endpoints: there is no kube-proxy.
		"--enable-aggregator-routing=true",
		"--audit-policy-file=" + configDir + "/audit-policy.yaml",
		"--audit-log-path=" + machine.StateDir + "/" + machine.LogDir + "/" + auditLogName,
	}
	if admissionConfig(c.platform.Cluster) != nil {
		args = append(args, "--admission-control-config-file="+configDir+"/"+admissionFile)
	}
	if config := c.options.runtimeConfig(); config != "" {
		args = append(args, "--runtime-config="+config)
	}
	return c.withFeatureGates(args, c.options.Kubernetes)
}

// auditPolicy logs the user and the object of each write, once per request:
// enough to count writes, and cheap.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  verbs: [create, update, patch, delete, deletecollection]
- level: None
`

func (c *Cluster) controllerManagerArgs() []string {
	kubeconfig := configDir + "/controller-manager.kubeconfig"
	return c.withFeatureGates([]string{
		program("kube-controller-manager"),
		"--kubeconfig=" + kubeconfig,
		"--authentication-kubeconfig=" + kubeconfig,
		"--authorization-kubeconfig=" + kubeconfig,
		// Looking up what the API server knows would fail until it is ready.
		"--authentication-skip-lookup=true",
		"--client-ca-file=" + configDir + "/ca.crt",
		"--bind-address=127.0.0.1",
		"--leader-elect=false",
		"--use-service-account-credentials=true",
		// The default rate makes the start of the controllers take seconds.
		"--kube-api-qps=200",
		"--kube-api-burst=400",
		"--root-ca-file=" + configDir + "/" + rootAuthorities,
		"--service-account-private-key-file=" + configDir + "/service-account.key",
		"--cluster-signing-cert-file=" + configDir + "/ca.crt",
		"--cluster-signing-key-file=" + configDir + "/ca.key",
	}, c.options.Kubernetes)
}

func (c *Cluster) schedulerArgs() []string {
	kubeconfig := configDir + "/scheduler.kubeconfig"
	return c.withFeatureGates([]string{
		program("kube-scheduler"),
		"--kubeconfig=" + kubeconfig,
		"--authentication-kubeconfig=" + kubeconfig,
		"--authorization-kubeconfig=" + kubeconfig,
		// Looking up what the API server knows would fail until it is ready.
		"--authentication-skip-lookup=true",
		"--client-ca-file=" + configDir + "/ca.crt",
		"--bind-address=127.0.0.1",
		"--leader-elect=false",
	}, c.options.Kubernetes)
}

// withFeatureGates adds the feature gates of a component of that version.
func (c *Cluster) withFeatureGates(args []string, kubernetes string) []string {
	var gates []string
	for gate, on := range c.options.featureGates(kubernetes) {
		gates = append(gates, fmt.Sprintf("%s=%t", gate, on))
	}
	if len(gates) == 0 {
		return args
	}
	slices.Sort(gates)
	return append(args, "--feature-gates="+strings.Join(gates, ","))
}

// cniConfig renders a node's pod network: a bridge with addresses of its own
// range, routed to the other machines without address translation.
func cniConfig(podCIDR string) string {
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": "localcluster",
  "plugins": [
    {
      "type": "bridge",
      "bridge": "cni0",
      "isGateway": true,
      "isDefaultGateway": true,
      "ipMasq": false,
      "hairpinMode": true,
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": %q}]]
      }
    }
  ]
}
`, podCIDR)
}

// kubeconfig renders a client configuration. Certificates are referred to by
// data, so that the file works wherever it is copied.
func kubeconfig(name, server string, ca []byte, c credentials) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: %[1]s
clusters:
- name: %[1]s
  cluster:
    server: %[2]s
    certificate-authority-data: %[3]s
users:
- name: %[1]s
  user:
    client-certificate-data: %[4]s
    client-key-data: %[5]s
contexts:
- name: %[1]s
  context:
    cluster: %[1]s
    user: %[1]s
`, name, server, base64Text(ca), base64Text(c.certificate), base64Text(c.key))
}
