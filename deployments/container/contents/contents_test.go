package contents

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

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
	root, version, err := Checkout()
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

// Both ways to build the image must build the same programs, with the same flags:
// without -static a hook doesn't run on a host with another C library.
func TestDockerfileBuildsTheSame(t *testing.T) {
	_, version, err := Checkout()
	if err != nil {
		t.Fatal(err)
	}
	got := readDockerfile(t, "../Dockerfile")
	want := dockerfile{
		version: version, user: Config(version).User, labels: labels("${VERSION}"), cgoFlags: cgoFlags,
		programs: map[string]goBuild{}, compilers: map[string]string{},
	}
	for _, p := range platforms() {
		want.compilers[p.architecture] = p.triple + "-gcc"
	}
	for _, p := range programs("${VERSION}") {
		want.programs[p.path] = goBuild{p.cgo, p.args("/out" + p.path)}
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(dockerfile{}, goBuild{})); diff != "" {
		t.Errorf("the Dockerfile (+) isn't what this package builds (-):\n%s", diff)
	}
}

// dockerfile has the build commands of a Dockerfile, without the variables'
// values.
type dockerfile struct {
	version   string // VERSION's default
	user      string
	labels    map[string]string
	cgoFlags  string
	compilers map[string]string  // by the architecture that they compile for
	programs  map[string]goBuild // by path in the image
}

// goBuild is one call of go build, or of go run.
type goBuild struct {
	cgo  bool
	args []string
}

func readDockerfile(t *testing.T, file string) dockerfile {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	d := dockerfile{labels: map[string]string{}, programs: map[string]goBuild{}, compilers: map[string]string{}}
	for _, m := range regexp.MustCompile(`(\w+)\) cc=(\S+) ;;`).FindAllStringSubmatch(string(data), -1) {
		d.compilers[m[1]] = m[2]
	}
	var goflags []string
	for line := range strings.Lines(strings.ReplaceAll(string(data), "\\\n", " ")) {
		words := splitWords(line)
		switch {
		case len(words) < 2:
		case words[0] == "ARG" && strings.HasPrefix(words[1], "VERSION="):
			d.version = strings.TrimPrefix(words[1], "VERSION=")
		case words[0] == "ENV" && strings.HasPrefix(words[1], "GOFLAGS="):
			goflags = strings.Fields(strings.TrimPrefix(words[1], "GOFLAGS="))
		case words[0] == "ENV" && strings.HasPrefix(words[1], "CGO_CFLAGS="):
			d.cgoFlags = strings.TrimPrefix(words[1], "CGO_CFLAGS=")
		case words[0] == "USER":
			d.user = words[1]
		case words[0] == "LABEL":
			for _, label := range words[1:] {
				key, value, _ := strings.Cut(label, "=")
				d.labels[key] = value
			}
		case words[0] == "RUN" && len(words) > 4 && words[2] == "go" && words[3] == "build":
			args := words[4:]
			if i := slices.Index(args, "&&"); i >= 0 {
				args = args[:i]
			}
			path := strings.TrimPrefix(args[slices.Index(args, "-o")+1], "/out")
			d.programs[path] = goBuild{words[1] == "CGO_ENABLED=1", slices.Concat([]string{"build"}, goflags, args)}
		case words[0] == "RUN" && strings.Contains(line, " go run "):
			args := words[slices.Index(words, "run"):]
			d.programs[strings.TrimPrefix(args[len(args)-1], "/out")] = goBuild{false, args}
		}
	}
	return d
}

// splitWords splits a line as a shell does that knows double quotes only.
func splitWords(line string) []string {
	var words []string
	quoted, open := false, false
	for _, r := range line {
		switch {
		case r == '"':
			quoted = !quoted
			if !open {
				words, open = append(words, ""), true
			}
		case !quoted && unicode.IsSpace(r):
			open = false
		default:
			if !open {
				words, open = append(words, ""), true
			}
			words[len(words)-1] += string(r)
		}
	}
	return words
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
