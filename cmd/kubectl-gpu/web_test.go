package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

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
