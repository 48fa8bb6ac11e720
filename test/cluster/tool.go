package cluster

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Tool returns the path of one program that clusters are made of or worked
// with, such as helm, and builds it into the cache first if it isn't there. It
// needs no cluster and no root. Programs whose source depends on the Kubernetes
// version, kubectl among them, are not to be had here.
func Tool(ctx context.Context, name string, log io.Writer) (string, error) {
	root, err := repositoryRoot()
	if err != nil {
		return "", err
	}
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	goVersion, err := exec.CommandContext(ctx, "go", "env", "GOVERSION").Output()
	if err != nil {
		return "", fmt.Errorf("run go, which builds %s: %w", name, err)
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", fmt.Errorf("make the cache directory: %w", err)
	}
	unlock, err := lockDir(cache, log)
	if err != nil {
		return "", err
	}
	defer unlock()
	for _, u := range units("", "") {
		if _, found := u.files[name]; !found || u.links != nil {
			continue
		}
		dir, err := u.ensure(ctx, root, cache, strings.TrimSpace(string(goVersion)), log)
		if err != nil {
			return "", err
		}
		return filepath.Join(dir, name), nil
	}
	return "", fmt.Errorf("%s is not among the programs that are built without a Kubernetes version", name)
}
