package obstacle

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// packages are those whose errors reach the kubelet from a prepare or an unprepare.
var packages = []string{
	"api/resource/v1beta1", "pkg/agenda", "pkg/claim", "pkg/driverroot", "pkg/gpu", "pkg/keylock", "pkg/mps", "pkg/mps/supervisor", "pkg/node/cdi",
	"pkg/node/containers", "pkg/node/datadir", "pkg/node/facts", "pkg/node/journal", "pkg/node/kubelet", "pkg/node/partition", "pkg/node/prepare",
	"pkg/node/sharing", "pkg/nvml",
}

// untold are the errors of these packages that aren't obstacles of their own, by the reason.
var untold = map[string][]string{
	"it comes with a text that is listed": {
		"device held by another claim", "this will be tried again, and succeeds when these have ended", "compute instances, MIG device",
		"/server.log ends with: ", "s.Message()", "v.unreadable", "f.absence()", "(nvidia-smi says that it is", "a share that is allocated several times has no limits of its own",
		"while the kubelet still has it prepared", "before the end of its previous devices", "a device plugin may serve its GPUs", "the MPS daemon doesn't work", "why",
		"no daemon",
	},
	"it is the end of a text that is listed": {"in use", "not supported", "not found", "another instance is there"},
	"it is a part of a configuration's error": {
		"it is an MPS share, whose processes run beside those of other claims", "it is one of several replicas of a GPU", "it is a time-sliced replica",
		" isn't for device ", "sharing.mpsConfig", "claim configuration: ", "is a JSON ", ": a JSON ",
	},
	"it is an error of the code": {
		"is no silicon", "can't be divided into MPS shares", "has no MPS daemon", "can't be an MPS daemon's name", "an MPS daemon needs a device",
		"is no UUID of a GPU or MIG device", "is not between 0 and ", " memory limits for ", "there is no time slice ", "can't be a %s's UID",
		"can't be its UID", "a CDI specification of device metadata mounts nothing",
	},
	"a program doesn't start, or ends, with it": {
		"is not an absolute path", "is not a directory", "Linux allows %d", "the kubelet's directory for plugins", "knows only one plugin of a driver at a time",
		"the plugin's sockets were removed or replaced by others", "is in use by another process: only one plugin may run on a node", "install that version of the plugin again",
		"the plugin doesn't start without this file", "claims were prepared with the journal in", "the file that the other plugin sent isn't the lock",
		"not serving yet: another supervisor has the run directory",
	},
	"it makes a record unreadable, which is reported by other texts": {
		"written by a newer version of the plugin", "(format %d, this one reads up to %d)", "there is no format %d", "the record is of", "negative numbers in the record",
		"it was unreadable when an earlier start renamed it", "not a regular file of at most", "is no process id",
	},
	"only the readings of GPUs, logs and other calls have it": {
		"process %d is another one", "NVML lists GPU", "the server doesn't say it", "the value of field", "the kernel's reports aren't read yet",
		"the plugin has not been able to look at the GPUs since", "is listed twice", "does not start with", "want 32 hexadecimal digits", "name MIG profile",
		"another plugin takes over the node",
	},
}

// TestAllErrorsAreListed: each error of the packages of a prepare is listed, unless its own
// words only say what was being done, and each text that is listed is in the sources.
func TestAllErrorsAreListed(t *testing.T) {
	errors, literals := read(t)
	if len(errors) < 200 {
		t.Fatalf("found only %d errors", len(errors))
	}
	var ours []string
	for _, o := range All() {
		if !o.Foreign {
			ours = append(ours, o.Texts...)
		}
	}
	listed := slices.Concat(append(slices.Collect(maps.Values(untold)), ours)...)
	for _, text := range listed {
		if !slices.ContainsFunc(literals, func(l string) bool { return strings.Contains(l, text) }) {
			t.Errorf("%q is listed, and no longer in the sources", text)
		}
	}
	for at, text := range errors {
		if !saysOnlyWhere(text) && !slices.ContainsFunc(listed, func(part string) bool { return strings.Contains(text, part) }) {
			t.Errorf("%s: %q keeps pods from starting, and isn't listed: add it to pkg/obstacle and run go generate there, or to untold with the reason", at, text)
		}
	}
}

// verbs are those of formats, with what doesn't differ around them.
var verbs = regexp.MustCompile(`%[a-zA-Z]|[^a-zA-Z]`)

// saysOnlyWhere reports whether an error says only what was being done, or nothing itself: the
// cause follows.
func saysOnlyWhere(format string) bool {
	return strings.HasSuffix(format, ": %w") && strings.Count(format, "%w") == 1 || verbs.ReplaceAllString(format, "") == ""
}

// read returns the texts of the errors of the packages, by place, and those and all string
// literals. Where an error's text isn't a literal, it is the expression.
func read(t *testing.T) (errors map[string]string, literals []string) {
	t.Helper()
	errors = make(map[string]string)
	for _, dir := range packages {
		files, err := filepath.Glob(filepath.Join("../..", dir, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", dir, len(files), err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			positions := token.NewFileSet()
			parsed, err := parser.ParseFile(positions, file, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range parsed.Decls {
				makes := []string{"fmt.Errorf", "errors.New"}
				if f, ok := d.(*ast.FuncDecl); ok && f.Name.Name == "Error" {
					makes = append(makes, "fmt.Sprintf")
				}
				ast.Inspect(d, func(n ast.Node) bool {
					switch n := n.(type) {
					case *ast.CallExpr:
						if slices.Contains(makes, types.ExprString(n.Fun)) {
							text := textOf(n.Args[0])
							errors[positions.Position(n.Pos()).String()] = text
							literals = append(literals, text)
						}
					case *ast.BasicLit, *ast.BinaryExpr:
						literals = append(literals, textOf(n.(ast.Expr)))
					}
					return true
				})
			}
		}
	}
	return errors, literals
}

// textOf returns the text of a string literal, or of several that are added; of other
// expressions, their source.
func textOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if text, err := strconv.Unquote(e.Value); err == nil {
			return text
		}
	case *ast.BinaryExpr:
		return textOf(e.X) + textOf(e.Y)
	}
	return types.ExprString(e)
}

// TestFind: of the obstacles that a message names, the most specific one is found.
func TestFind(t *testing.T) {
	for message, want := range map[string]struct {
		class Class
		text  string
	}{
		"make MIG partition 3g.40gb: create MIG instance 3g.40gb at 4 of GPU x: nvmlDeviceCreateGpuInstanceWithPlacement: insufficient resources (Insufficient Resources)": {Device, "insufficient resources"},
		"create MIG instance 3g.40gb at 4 of GPU x: nvmlDeviceCreateGpuInstanceWithPlacement: Unknown Error":                                                               {Device, "create MIG instance"},
		"device held by another claim: claim a/b holds gpu-1, which is on its way out (the claim was deleted)":                                                             {Moment, "which is on its way out"},
		"set up what the claim shares: share GPU x: start the MPS daemon d: the MPS supervisor of this node does not answer: look at the node's pod":                       {Node, "the MPS supervisor of this node does not answer"},
		`request "gpu": retrying can't help: configuration in the DeviceClass: unknown field`:                                                                              {Claim, ": configuration in the "},
		"wait for another operation on the claim's GPUs (GPU x: it is being reset): context deadline exceeded":                                                             {Moment, "wait for another operation on"},
	} {
		if got, ok := Find(message); !ok || got.Class != want.class || got.Texts[0] != want.text {
			t.Errorf("%s: %+v, want %+v", message, got, want)
		}
	}
	if got, ok := Find("something that nobody knows"); ok {
		t.Errorf("an unknown message: %+v", got)
	}
}

// TestComplete: each obstacle has all that its row shows, and no text is another's.
func TestComplete(t *testing.T) {
	seen := make(map[string]bool)
	for _, o := range All() {
		if o.Stage == "" || o.Class == "" || len(o.Texts) == 0 || o.Means == "" || !strings.HasSuffix(o.Do, ".") || strings.Contains(o.Means+o.Do, "|") {
			t.Errorf("%+v", o)
		}
		for _, text := range o.Texts {
			if seen[text] || strings.Contains(text, "%") {
				t.Errorf("%q is listed twice, or differs from one message to the next", text)
			}
			seen[text] = true
		}
	}
}
