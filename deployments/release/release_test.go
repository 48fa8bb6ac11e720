package main

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/deployments/container/contents"
	"github.com/tessera-dra/tessera/sim/cluster"
)

func TestCheckVersion(t *testing.T) {
	for version, want := range map[string]string{
		"0.2.0":       "",
		"1.0.0-rc.1":  "",
		"":            "make release VERSION=0.2.0",
		"v0.2.0":      "without a v",
		"0.2":         "write a semantic version",
		"01.2.3":      "write a semantic version",
		"0.2.0-dirty": "", // semantic, and somebody may want it
		"0.2.0+abc":   "can't have a +",
		"../../etc":   "write a semantic version",
	} {
		err := checkVersion(version)
		if (err == nil) != (want == "") || (err != nil && !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: error %v, want %q", version, err, want)
		}
	}
}

func TestRunRefuses(t *testing.T) {
	err := run(t.Context(), []string{"-version", "0.2.0", "now"}, io.Discard)
	if err == nil || !strings.Contains(err.Error(), `unexpected argument "now"`) {
		t.Errorf("error %v", err)
	}
}

// repository makes a repository with one commit, and returns a function that
// runs git in it.
func repository(t *testing.T) (dir string, run func(args ...string)) {
	t.Helper()
	dir = t.TempDir()
	run = func(args ...string) {
		t.Helper()
		cmd := exec.Command("git", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null",
			"GIT_AUTHOR_NAME=A", "GIT_AUTHOR_EMAIL=a@example.com", "GIT_COMMITTER_NAME=A", "GIT_COMMITTER_EMAIL=a@example.com",
			"GIT_COMMITTER_DATE=2026-11-22T13:00:00+01:00")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	run("init", "-q")
	run("commit", "-q", "--allow-empty", "-m", "mps: Start daemons")
	return dir, run
}

func TestReadSource(t *testing.T) {
	dir, run := repository(t)
	s, err := readSource(t.Context(), dir, "0.2.0")
	if err != nil {
		t.Fatal(err)
	}
	if want := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC); !s.time.Equal(want) || len(s.commit) != 40 {
		t.Errorf("commit %s of %s", s.commit, s.time)
	}
	run("tag", "-m", "annotated", "v0.2.0")
	if _, err := readSource(t.Context(), dir, "0.2.0"); err != nil {
		t.Errorf("with the tag on the commit: %v", err)
	}
	run("commit", "-q", "--allow-empty", "-m", "another")
	if _, err := readSource(t.Context(), dir, "0.2.0"); err == nil || !strings.Contains(err.Error(), "tag v0.2.0 is on commit "+s.commit) {
		t.Errorf("with the tag elsewhere: error %v", err)
	}
	write(t, dir, "new.go", "package new\n")
	if _, err := readSource(t.Context(), dir, "0.3.0"); err == nil || !strings.Contains(err.Error(), "?? new.go") {
		t.Errorf("with a new file: error %v", err)
	}
}

func TestChangelog(t *testing.T) {
	dir, run := repository(t)
	run("tag", "v0.1.0")
	for _, subject := range []string{"mps: Adopt daemons", "Raise the timeout", "api: Add a field", "node/cdi, mps: Mount one pipe", "mps: Stop daemons"} {
		run("commit", "-q", "--allow-empty", "-m", subject)
	}
	s, err := readSource(t.Context(), dir, "0.2.0")
	if err != nil {
		t.Fatal(err)
	}
	run("tag", "v0.2.0") // its own tag is no end
	file := filepath.Join(t.TempDir(), "CHANGELOG.md")
	if err := writeChangelog(t.Context(), s, "sha256:abc", file); err != nil {
		t.Fatal(err)
	}
	want := "# Tessera 0.2.0\n\nCommit " + s.commit + " of 2026-11-22.\nImage index `sha256:abc`.\n\n" + `## Changes since v0.1.0

### api

- Add a field

### mps

- Stop daemons
- Adopt daemons

### node/cdi

- node/cdi, mps: Mount one pipe

### Everything else

- Raise the timeout
`
	if diff := cmp.Diff(want, read(t, file)); diff != "" {
		t.Errorf("changelog (-want +got):\n%s", diff)
	}
}

func TestChecksums(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "b", "two")
	write(t, dir, "a", "one")
	if err := writeChecksums(dir); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sha256sum", "--check", "--strict", "SHA256SUMS")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil || string(out) != "a: OK\nb: OK\n" {
		t.Errorf("sha256sum: %v\n%s", err, out)
	}
}

// The package must not depend on when and where the chart was checked out.
func TestChartIsReproducible(t *testing.T) {
	helm, err := cluster.Tool(t.Context(), "helm", os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	var packages []string
	for range 2 {
		chart, dir := filepath.Join(t.TempDir(), "tessera"), t.TempDir()
		if err := os.CopyFS(chart, os.DirFS(filepath.Join("../..", contents.Chart))); err != nil {
			t.Fatal(err)
		}
		if err := packChart(t.Context(), helm, chart, dir, "7.8.9-rc.1", time.Unix(1795348800, 0)); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, "tessera-7.8.9-rc.1.tgz")
		packages = append(packages, read(t, file))
		out, err := exec.Command(helm, "show", "chart", file).Output()
		if err != nil || !strings.Contains(string(out), "\nappVersion: 7.8.9-rc.1\n") || !strings.Contains(string(out), "\nversion: 7.8.9-rc.1\n") {
			t.Errorf("helm show chart: %v\n%s", err, out)
		}
	}
	if packages[0] != packages[1] {
		t.Error("the same chart gave two packages")
	}
}

// TestPlugin: an archive has the program and the license and depends on nothing else, and
// krew's manifest has the checksums of all archives.
func TestPlugin(t *testing.T) {
	dir := t.TempDir()
	at := time.Unix(1795348800, 0)
	files := []packed{{"LICENSE", 0o644, []byte("text")}, {"kubectl-gpu", 0o755, []byte("program")}}
	for _, p := range clientPlatforms() {
		if err := writeArchive(filepath.Join(dir, p.archive("1.2.3")), at, files); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.Command("tar", "--utc", "-tvzf", filepath.Join(dir, "kubectl-gpu-1.2.3-linux-amd64.tar.gz")).Output()
	const want = "-rw-r--r-- 0/0               4 2026-11-22 12:00 LICENSE\n-rwxr-xr-x 0/0               7 2026-11-22 12:00 kubectl-gpu\n"
	if err != nil || string(out) != want {
		t.Errorf("tar: %v\n%s", err, out)
	}
	if err := writeManifest("1.2.3", dir); err != nil {
		t.Fatal(err)
	}
	if err := writeChecksums(dir); err != nil {
		t.Fatal(err)
	}
	manifest := read(t, filepath.Join(dir, "tessera.yaml"))
	for line := range strings.Lines(read(t, filepath.Join(dir, "SHA256SUMS"))) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		if name != "tessera.yaml" && (!strings.Contains(manifest, "sha256: "+sum+"\n") || !strings.Contains(manifest, "/v1.2.3/"+name+"\n")) {
			t.Errorf("krew's manifest lacks %s with checksum %s", name, sum)
		}
	}
}

func write(t *testing.T, dir, name, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
