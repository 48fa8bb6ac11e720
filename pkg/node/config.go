package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/kubelet"
	"github.com/tessera-dra/tessera/pkg/resource/v1alpha3"
)

// Config has the settings of the kubelet plugin.
type Config struct {
	// NodeName of the Node the plugin runs on.
	NodeName string
	// PodUID of the plugin's pod. With it, a plugin takes over from a running one, where
	// the kubelet is 1.33 or later.
	PodUID string
	// Kubeconfig to reach the API server with; empty in a cluster.
	Kubeconfig string
	// HostRoot is the path at which the host's file system is mounted.
	HostRoot string
	// DriverRoot on the host; empty: found.
	DriverRoot string
	// KubeletRoot, DataDir and CDIDir have the same path here and on the host.
	KubeletRoot, DataDir, CDIDir string
	// CDIHook is nvidia-cdi-hook as it came with the plugin.
	CDIHook string
	// MPSSocket is where the node's MPS supervisor listens. Its directory has the
	// same path here and on the host.
	MPSSocket string
	// MPSComputeMode determines the compute mode of a GPU with an MPS daemon:
	// "exclusive-process" or "unchanged".
	MPSComputeMode string
	// DeviceMetadata gives containers files about their devices (KEP-5304).
	DeviceMetadata bool
	// MetricsAddress to serve /metrics on; empty: none.
	MetricsAddress string
	// MetricsAuthentication serves them over TLS, and only to those whom the API server
	// lets get the path.
	MetricsAuthentication bool
	// HealthAddress to serve /healthz and /readyz on; empty: none.
	HealthAddress string
	// Version of the plugin, for the report.
	Version string
}

// The values of --mps-compute-mode.
const (
	mpsExclusiveProcess = "exclusive-process"
	mpsUnchanged        = "unchanged"
)

// AddFlags registers the flags with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.NodeName, "node-name", os.Getenv("NODE_NAME"), "name of the Node this plugin runs on (default: the environment's NODE_NAME)")
	fs.StringVar(&c.PodUID, "pod-uid", os.Getenv("POD_UID"), "UID of this plugin's pod, to take over from a running plugin without a gap (default: the environment's POD_UID)")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "file with the API server's address and credentials (default: those of the pod)")
	fs.StringVar(&c.HostRoot, "host-root", "/", "where the host's file system is mounted")
	fs.StringVar(&c.DriverRoot, "driver-root", "", "directory on the host with the NVIDIA driver (default: searched)")
	fs.StringVar(&c.KubeletRoot, "kubelet-root", "/var/lib/kubelet", "the kubelet's root directory")
	fs.StringVar(&c.DataDir, "data-dir", "/var/lib/tessera", "directory for the journal and the files of this plugin that containers need; the hook program is in --kubelet-root where no program can be started here; same path here and on the host")
	fs.StringVar(&c.CDIDir, "cdi-dir", "/var/run/cdi", "directory for CDI specifications; same path here and on the host")
	fs.StringVar(&c.CDIHook, "cdi-hook", "/usr/bin/nvidia-cdi-hook", "nvidia-cdi-hook to install on the host")
	fs.StringVar(&c.MPSSocket, "mps-socket", "/run/tessera/mps/supervisor.sock", "socket of this node's MPS supervisor; same path here and on the host")
	fs.StringVar(&c.MPSComputeMode, "mps-compute-mode", mpsExclusiveProcess, "compute mode of a whole GPU while it has an MPS daemon: exclusive-process, so that nothing but the daemon's clients can use it, or unchanged")
	fs.BoolVar(&c.DeviceMetadata, "device-metadata", true, "give containers files about their devices below /var/run/kubernetes.io/dra-device-attributes")
	fs.StringVar(&c.MetricsAddress, "metrics-address", ":8081", "address to serve /metrics on; empty serves none")
	fs.BoolVar(&c.MetricsAuthentication, "metrics-authentication", false,
		"serve metrics over TLS, to bearers of tokens that may get /metrics from the API server")
	fs.StringVar(&c.HealthAddress, "health-address", "", "address to serve /healthz and /readyz on; empty serves none")
}

// serverPatience is how long the API server has to answer.
const serverPatience = 5 * time.Second

// HookDirs returns the directories of the host that may have the hook program if none can
// be started in the data directory. Container-Optimized OS mounts /var noexec, and the
// kubelet's root directory below it exec.
func (c *Config) HookDirs() []string {
	return []string{kubelet.DataDirectory(c.KubeletRoot, gpu.DriverName)}
}

// Validate reports everything that is wrong, each with its flag.
func (c *Config) Validate() error {
	var errs []error
	if c.NodeName == "" {
		errs = append(errs, errors.New("--node-name: is required (or NODE_NAME in the environment)"))
	} else if problems := validation.IsDNS1123Subdomain(c.NodeName); len(problems) > 0 {
		errs = append(errs, fmt.Errorf("--node-name: %q is no name of a Node: %s", c.NodeName, strings.Join(problems, "; ")))
	}
	for flag, path := range map[string]string{
		"--host-root": c.HostRoot, "--kubelet-root": c.KubeletRoot,
		"--data-dir": c.DataDir, "--cdi-dir": c.CDIDir, "--cdi-hook": c.CDIHook, "--mps-socket": c.MPSSocket,
	} {
		if !filepath.IsAbs(path) {
			errs = append(errs, fmt.Errorf("%s: %q is not an absolute path", flag, path))
		}
	}
	if c.DriverRoot != "" && !filepath.IsAbs(c.DriverRoot) {
		errs = append(errs, fmt.Errorf("--driver-root: %q is not an absolute path", c.DriverRoot))
	}
	if c.MPSComputeMode != mpsExclusiveProcess && c.MPSComputeMode != mpsUnchanged {
		errs = append(errs, fmt.Errorf("--mps-compute-mode: %q is neither %s nor %s", c.MPSComputeMode, mpsExclusiveProcess, mpsUnchanged))
	}
	return errors.Join(append(errs, c.validateHost())...)
}

// validateHost checks that the required paths exist.
func (c *Config) validateHost() error {
	var errs []error
	if err := isDir(c.HostRoot); err != nil {
		errs = append(errs, fmt.Errorf("--host-root: %w", err))
	}
	if err := isDir(c.KubeletRoot); err != nil {
		errs = append(errs, fmt.Errorf("--kubelet-root: %w; give the kubelet's --root-dir", err))
	}
	if info, err := os.Stat(c.CDIHook); err != nil {
		errs = append(errs, fmt.Errorf("--cdi-hook: %w", err))
	} else if info.Mode()&0o111 == 0 {
		errs = append(errs, fmt.Errorf("--cdi-hook: %s is not executable", c.CDIHook))
	}
	return errors.Join(errs...)
}

func isDir(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is not a directory", path)
	}
	return nil
}

// userAgent names the plugin to the API server.
const userAgent = "tessera-kubelet-plugin"

// restConfig says how to reach the API server.
func (c *Config) restConfig() (*rest.Config, error) {
	var cfg *rest.Config
	var err error
	if c.Kubeconfig == "" {
		if cfg, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("--kubeconfig: is required outside of a pod: %w", err)
		}
	} else if cfg, err = clientcmd.BuildConfigFromFlags("", c.Kubeconfig); err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	// Claims are smaller, and read faster, as protobuf. Who has custom resources to
	// read sets JSON.
	cfg.ContentType, cfg.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	cfg.Wrap(v1alpha3.Transport)
	cfg.UserAgent = userAgent + "/" + c.Version
	// One GET for each claim that a pod brings here; the default of five a
	// second would make pods that start together wait for each other.
	cfg.QPS = -1
	return cfg, nil
}
