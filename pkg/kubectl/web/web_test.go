package web

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"k8s.io/cli-runtime/pkg/genericclioptions"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// TestWebTells: the terminal names rights that are missing, as the page does.
func TestWebTells(t *testing.T) {
	s := kubectltest.New(t)
	s.Forbidden = []string{"/api/v1/pods", "/api/v1/namespaces/default/pods"}
	api := httptest.NewServer(s)
	defer api.Close()
	ctx, interrupt := context.WithTimeout(t.Context(), time.Minute)
	defer interrupt()
	const want = "note: You may not list pods: which pods wait isn't known. Ask for the verbs list and watch on them.\n"
	told := &waiting{text: want, then: interrupt}
	cmd := kubectltest.Root(genericclioptions.IOStreams{In: strings.NewReader(""), Out: io.Discard, ErrOut: told}, terminal.Screen{}, Command)
	cmd.SetArgs([]string{"web", "--server", api.URL, "--kubeconfig", kubectltest.Kubeconfig(t)})
	if err := cmd.ExecuteContext(ctx); err != nil || strings.Count(told.written.String(), want) != 1 {
		t.Errorf("%v: %s", err, &told.written)
	}
}

// waiting calls then when a text is written.
type waiting struct {
	written bytes.Buffer // not embedded: WriteString would bypass Write

	text string
	then func()
}

// Write implements io.Writer.
func (w *waiting) Write(b []byte) (int, error) {
	n, err := w.written.Write(b)
	if strings.Contains(w.written.String(), w.text) {
		w.then()
	}
	return n, err
}

// TestBrowserIsWaitedFor: a browser that has ended leaves no process behind.
func TestBrowserIsWaitedFor(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("processes are looked for in /proc")
	}
	dir := t.TempDir()
	told := filepath.Join(dir, "pid")
	script := "#!/bin/sh\necho $$ $1 >" + told + ".new && mv " + told + ".new " + told + "\n"
	if err := os.WriteFile(filepath.Join(dir, "xdg-open"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	if err := openBrowser(t.Context(), "http://127.0.0.1:1/"); err != nil {
		t.Fatal(err)
	}
	pid := ""
	for until := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		raw, err := os.ReadFile(told)
		if pid == "" && err == nil {
			var url string
			if pid, url, _ = strings.Cut(strings.TrimSpace(string(raw)), " "); url != "http://127.0.0.1:1/" {
				t.Errorf("the browser opens %q", url)
			}
		}
		if _, err := os.Stat("/proc/" + pid); pid != "" && errors.Is(err, fs.ErrNotExist) {
			return
		}
		if time.Now().After(until) {
			t.Fatalf("process %q of the browser is still there", pid)
		}
	}
}
