package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/tessera-dra/tessera/pkg/node"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
)

// TestAdopt takes defaults from command lines of process 1.
func TestAdopt(t *testing.T) {
	defaults := []string{"/", "", "/var/lib/tessera", "/var/run/cdi"}
	for name, tc := range map[string]struct {
		args []string
		want []string // host root, driver root, data directory, CDI directory
	}{
		"the plugin's pod": {
			args: []string{"/usr/bin/kubelet-plugin", "--node-name=node-0", "--host-root=/host", "--driver-root=", "--data-dir", "/data", "--cdi-dir=/cdi", "-v=2", "--logging-format=json"},
			want: []string{"/host", "", "/data", "/cdi"},
		},
		"a host":                 {args: []string{"/sbin/init", "--data-dir=/data"}, want: defaults},
		"not readable":           {want: defaults},
		"a plugin with defaults": {args: []string{"kubelet-plugin"}, want: defaults},
	} {
		t.Run(name, func(t *testing.T) {
			var cfg node.Config
			flags := pflag.NewFlagSet("", pflag.ContinueOnError)
			cfg.AddFlags(flags)
			adopt(flags, tc.args)
			if diff := cmp.Diff(tc.want, []string{cfg.HostRoot, cfg.DriverRoot, cfg.DataDir, cfg.CDIDir}); diff != "" {
				t.Errorf("host root, driver root, data and CDI directory (-want +got):\n%s", diff)
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
