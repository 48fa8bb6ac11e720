package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/pflag"

	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/mps"
)

// Config of a supervisor.
type Config struct {
	// RunDir is the run directory. It is at the same path on the host and here.
	RunDir string
	// HostRoot is where the host's file system is mounted.
	HostRoot string
	// DriverRoot is the host's directory that the driver is under; empty: found.
	DriverRoot string
	// MetricsAddress is where /metrics is served; empty: nowhere.
	MetricsAddress string
	// HealthAddress is where /healthz and /readyz are served; empty: nowhere.
	HealthAddress string
	// Steps, which may be nil, are told of each effect that a crash could leave alone;
	// tests stop there.
	Steps *failpoint.Steps `json:"-"`
}

// AddFlags adds the flags.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.RunDir, "run-dir", "/run/tessera/mps", "`directory` for the socket and the daemons' files: on a tmpfs of the host, and here at the same path")
	fs.StringVar(&c.HostRoot, "host-root", "/", "`directory` where the host's file system is mounted")
	fs.StringVar(&c.MetricsAddress, "metrics-address", "", "`address` to serve /metrics on, such as :8081 (default: nowhere)")
	fs.StringVar(&c.HealthAddress, "health-address", "", "`address` to serve /healthz and /readyz on, such as :8082 (default: nowhere)")
	fs.StringVar(&c.DriverRoot, "driver-root", "", "`directory` on the host that the NVIDIA driver is installed under (default: found)")
}

// Validate says which flags can't be meant.
func (c *Config) Validate() error {
	var errs []error
	for flag, path := range map[string]string{"--run-dir": c.RunDir, "--host-root": c.HostRoot} {
		if !filepath.IsAbs(path) {
			errs = append(errs, fmt.Errorf("%s: %q is not an absolute path", flag, path))
		}
	}
	if c.DriverRoot != "" && !filepath.IsAbs(c.DriverRoot) {
		errs = append(errs, fmt.Errorf("--driver-root: %q is not an absolute path", c.DriverRoot))
	}
	if info, err := os.Stat(c.HostRoot); err != nil || !info.IsDir() {
		errs = append(errs, fmt.Errorf("--host-root: %s is not a directory", c.HostRoot))
	}
	return errors.Join(errs...)
}

// runDir is the run directory, with the names of its files.
func (c *Config) runDir() mps.RunDir { return mps.RunDir(c.RunDir) }

// place is a daemon's directory.
type place string

func (c *Config) place(name string) place { return place(c.runDir().Daemon(name)) }

func (p place) record() string  { return filepath.Join(string(p), mps.RecordFile) }
func (p place) pipe() string    { return filepath.Join(string(p), "pipe") }
func (p place) clients() string { return filepath.Join(string(p), "clients") }
func (p place) log() string     { return filepath.Join(string(p), "log") }
func (p place) shm() string     { return filepath.Join(string(p), "shm") }
func (p place) pidFile() string { return filepath.Join(p.pipe(), program+".pid") }
func (p place) startLog() string {
	return filepath.Join(p.log(), "start.log")
}

// aside is where a record that can't be read is put: not in the directory, which
// is removed.
func (p place) aside() string { return string(p) + asideSuffix }

const asideSuffix = ".corrupt"
