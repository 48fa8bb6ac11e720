package control_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/control"
)

func TestRESTConfigRefuses(t *testing.T) {
	dir := t.TempDir()
	garbage := filepath.Join(dir, "garbage")
	empty := filepath.Join(dir, "empty")
	for file, content := range map[string]string{garbage: "certainly: [not", empty: ""} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for name, tc := range map[string]struct{ file, want string }{
		"no file and no pod":   {"", "--kubeconfig FILE"},
		"a file that is gone":  {filepath.Join(dir, "gone"), filepath.Join(dir, "gone") + " can't be used"},
		"a file of garbage":    {garbage, garbage + " can't be used"},
		"a file that is empty": {empty, empty + " can't be used"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := control.RESTConfig(tc.file); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q in it", err, tc.want)
			}
		})
	}
}
