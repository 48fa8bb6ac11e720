package main

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/tessera-dra/tessera/pkg/node"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
)

// TestAdopt takes defaults from the command line of the plugin in the same container. The
// doctor, process 9, sees all processes of the host.
func TestAdopt(t *testing.T) {
	type process struct {
		namespace string
		args      []string
	}
	doctorItself := process{"mnt:[2]", []string{"kubelet-plugin", "doctor", "--strict"}}
	defaults := []string{"/", "", "/var/lib/kubelet", "/var/lib/tessera", "/var/run/cdi"}
	for name, tc := range map[string]struct {
		processes map[int]process
		want      []string // host root, driver root, kubelet root, data directory, CDI directory
	}{
		"the plugin's pod": {
			processes: map[int]process{
				1: {"mnt:[1]", []string{"/sbin/init", "--data-dir=/init"}},
				2: {"mnt:[2]", []string{"/bin/sh", "--data-dir=/shell"}},
				3: {"mnt:[3]", []string{"/usr/bin/kubelet-plugin", "--data-dir=/other"}}, // of another node's container
				5: {"mnt:[2]", []string{"/usr/bin/kubelet-plugin", "--node-name=node-0", "--host-root=/host", "--driver-root=", "--kubelet-root=/kubelet", "--data-dir", "/data", "--cdi-dir=/cdi", "-v=2", "--logging-format=json"}},
				9: doctorItself,
			},
			want: []string{"/host", "", "/kubelet", "/data", "/cdi"},
		},
		"a host": {
			processes: map[int]process{5: {"mnt:[3]", []string{"/usr/bin/kubelet-plugin", "--data-dir=/data"}}, 9: doctorItself},
			want:      defaults,
		},
		"not readable":           {want: defaults},
		"a plugin with defaults": {processes: map[int]process{5: {"mnt:[2]", []string{"kubelet-plugin"}}, 9: doctorItself}, want: defaults},
	} {
		t.Run(name, func(t *testing.T) {
			proc := t.TempDir()
			for pid, p := range tc.processes {
				dir := filepath.Join(proc, strconv.Itoa(pid))
				err := errors.Join(
					os.MkdirAll(filepath.Join(dir, "ns"), 0o755), os.Symlink(p.namespace, filepath.Join(dir, "ns/mnt")),
					os.WriteFile(filepath.Join(dir, "cmdline"), []byte(strings.Join(p.args, "\x00")+"\x00"), 0o644))
				if err != nil {
					t.Fatal(err)
				}
			}
			var cfg node.Config
			flags := pflag.NewFlagSet("", pflag.ContinueOnError)
			cfg.AddFlags(flags)
			adopt(flags, pluginOf(proc, 9))
			if diff := cmp.Diff(tc.want, []string{cfg.HostRoot, cfg.DriverRoot, cfg.KubeletRoot, cfg.DataDir, cfg.CDIDir}); diff != "" {
				t.Errorf("host root, driver root, kubelet root, data and CDI directory (-want +got):\n%s", diff)
			}
			if got := flags.Lookup("data-dir").DefValue; got != cfg.DataDir {
				t.Errorf("--help says that the data directory is %s", got)
			}
		})
	}
}

func TestWriteReport(t *testing.T) {
	report := doctor.Report{Looks: 3, Claims: 1, GPUs: 2, Instances: 1, Daemons: 2, Findings: []doctor.Finding{
		{Level: doctor.Trouble, Check: "two-holders", What: "it is so", Do: "mend it", Claim: "default/trainer", GPU: "GPU-1"},
		{Level: doctor.Note, Check: "instance-of-others", What: "so it is", Path: "/a/file"},
	}}
	for format, want := range map[string]string{
		"text": `TROUBLE   two-holders: it is so
          claim   default/trainer
          GPU     GPU-1
          do      mend it
NOTE      instance-of-others: so it is
          file    /a/file
2 GPUs, 1 claim, 1 MIG instance and 2 MPS daemons made by this driver: the same trouble in each of 3 checks (if pods are starting or ending on this node, run it again).
`,
		"json": `{
  "healthy": false,
  "looks": 3,
  "claims": 1,
  "instances": 1,
  "daemons": 2,
  "gpus": 2,
  "findings": [
    {
      "level": "trouble",
      "check": "two-holders",
      "what": "it is so",
      "do": "mend it",
      "claim": "default/trainer",
      "gpu": "GPU-1"
    },
    {
      "level": "note",
      "check": "instance-of-others",
      "what": "so it is",
      "path": "/a/file"
    }
  ]
}
`,
	} {
		t.Run(format, func(t *testing.T) {
			var b strings.Builder
			if err := writeReport(&b, report, format); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, b.String()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}
