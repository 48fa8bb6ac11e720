package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAppVersion(t *testing.T) {
	for name, c := range map[string]struct{ chart, want string }{
		"plain":  {"version: 9\nappVersion: 0.1.0\n", "0.1.0"},
		"quoted": {"appVersion: \"1.2.3-rc.1\"\n", "1.2.3-rc.1"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := appVersion(c.chart)
			if err != nil || got != c.want {
				t.Errorf("%q, error %v, want %q", got, err, c.want)
			}
		})
	}
	if _, err := appVersion("version: 1.0\n"); err == nil {
		t.Error("a chart without appVersion was taken")
	}
}

// The image and the chart must mean the same image.
func TestCheckoutFindsTheChart(t *testing.T) {
	root, version, err := checkout()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(root, "deployments/helm/tessera/values.yaml")); err != nil {
		t.Error(err)
	}
	if version == "" {
		t.Error("no version")
	}
}

// Both ways to build the image must build the same programs.
func TestDockerfileBuildsTheSame(t *testing.T) {
	data, err := os.ReadFile("../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	var missing []string
	for _, p := range programs("1") {
		if !strings.Contains(string(data), "-o /out"+p.path+" "+p.pkg) {
			missing = append(missing, p.path+" from "+p.pkg)
		}
	}
	if diff := cmp.Diff([]string(nil), missing); diff != "" {
		t.Errorf("the Dockerfile lacks (-want +got):\n%s", diff)
	}
}

func TestInspect(t *testing.T) {
	text := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(text, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := inspect(text); err == nil {
		t.Error("a script was taken for a program")
	}
	if _, err := inspect("/proc/self/exe"); err != nil {
		t.Errorf("this test's program: %v", err)
	}
}

func TestRunRefusesArguments(t *testing.T) {
	err := run(t.Context(), []string{"everything"}, io.Discard)
	if err == nil || !strings.Contains(err.Error(), `unexpected argument "everything"`) {
		t.Errorf("error %v", err)
	}
}
