package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// valid is a configuration without mistakes.
func valid(t *testing.T) Config {
	t.Helper()
	t.Setenv("NODE_NAME", "node-0")
	var c Config
	c.AddFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	dir := t.TempDir()
	c.KubeletRoot, c.DataDir, c.CDIDir = dir, filepath.Join(dir, "data"), filepath.Join(dir, "cdi")
	c.CDIHook = filepath.Join(dir, "hook")
	if err := os.WriteFile(c.CDIHook, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestValidate(t *testing.T) {
	ok := valid(t)
	if err := ok.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"no node":            {func(c *Config) { c.NodeName = "" }, "--node-name: is required"},
		"no name of a node":  {func(c *Config) { c.NodeName = "Node 0" }, `--node-name: "Node 0"`},
		"relative data dir":  {func(c *Config) { c.DataDir = "data" }, `--data-dir: "data"`},
		"no kubelet there":   {func(c *Config) { c.KubeletRoot = "/nothing/there" }, "--kubelet-root: "},
		"no host there":      {func(c *Config) { c.HostRoot = "/nothing/there" }, "--host-root: "},
		"hook is a text":     {func(c *Config) { c.CDIHook = "/proc/version" }, "--cdi-hook: /proc/version is not executable"},
		"no hook":            {func(c *Config) { c.CDIHook = "/nothing/there" }, "--cdi-hook: "},
		"relative root":      {func(c *Config) { c.DriverRoot = "driver" }, `--driver-root: "driver"`},
		"relative cdi dir":   {func(c *Config) { c.CDIDir = "" }, "--cdi-dir: "},
		"all mistakes named": {func(c *Config) { c.NodeName, c.CDIDir = "", "" }, "--node-name"},
	} {
		t.Run(name, func(t *testing.T) {
			c := ok
			tc.change(&c)
			if err := c.Validate(); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestWrongKubeconfig(t *testing.T) {
	garbage := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(garbage, []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{"none": "/nothing/there", "garbage": garbage, "outside of a pod": ""} {
		t.Run(name, func(t *testing.T) {
			c := valid(t)
			c.Kubeconfig = path
			err := Run(t.Context(), c)
			if err == nil || !strings.Contains(err.Error(), "--kubeconfig: ") {
				t.Errorf("got %v, want an error that names --kubeconfig", err)
			}
			if _, err := os.Stat(c.DataDir); err == nil {
				t.Error("a plugin that can't run has left something behind")
			}
		})
	}
}
