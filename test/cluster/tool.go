package cluster

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
)

// Tool returns the path of one program that clusters are made of or worked
// with, such as helm, and builds it into the cache first if it isn't there. It
// needs no cluster and no root. Programs whose source depends on the Kubernetes
// version, kubectl among them, are not to be had here.
func Tool(ctx context.Context, name string, log io.Writer) (string, error) {
	b, err := newBuilder(ctx, log)
	if err != nil {
		return "", err
	}
	for _, u := range units(Versions{}, "") {
		if _, found := u.files[name]; !found || u.links != nil {
			continue
		}
		dir, err := b.ensure(ctx, &u, "")
		if err != nil {
			return "", err
		}
		return filepath.Join(dir, name), nil
	}
	return "", fmt.Errorf("%s is not among the programs that are built without a Kubernetes version", name)
}
