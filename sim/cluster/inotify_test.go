package cluster

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestAllowInotify(t *testing.T) {
	for _, tc := range []struct {
		name, limit, want, log string
		fails                  bool
	}{
		{name: "raised", limit: "128\n", want: "1024", log: "from 128 to 1024"},
		{name: "high enough", limit: "8192\n", want: "8192\n"},
		{name: "not a number", limit: "many", want: "many", fails: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "max_user_instances")
			if err := os.WriteFile(path, []byte(tc.limit), 0o644); err != nil {
				t.Fatal(err)
			}
			var log bytes.Buffer
			if err := allowInotify(path, &log); (err != nil) != tc.fails {
				t.Fatalf("error: %v", err)
			}
			if got, err := os.ReadFile(path); err != nil || string(got) != tc.want {
				t.Errorf("the limit is %q (%v), want %q", got, err, tc.want)
			}
			if tc.log == "" && log.Len() > 0 || !strings.Contains(log.String(), tc.log) {
				t.Errorf("log %q, want %q in it", log.String(), tc.log)
			}
		})
	}
}
