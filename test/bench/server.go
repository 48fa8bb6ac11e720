package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/tessera-dra/tessera/test/apiserver"
)

// crds of the product, seen from the root of the checkout.
const crds = "deployments/helm/tessera/files/crds"

// server is a real API server and a real etcd, which doesn't sync its files, with the
// product's custom resources.
type server struct {
	dir string // with their programs
	env *envtest.Environment
	// config is an administrator's, without a limit of requests.
	config *rest.Config
}

func startServer(ctx context.Context) (*server, error) {
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return nil, fmt.Errorf("make a directory: %w", err)
	}
	s := &server{dir: dir, env: &envtest.Environment{CRDDirectoryPaths: []string{crds}, ErrorIfCRDPathMissing: true}}
	if err = apiserver.Binaries(ctx, dir, os.Stderr); err == nil {
		s.config, err = apiserver.Start(s.env, dir)
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	s.config.QPS = -1
	return s, nil
}

// stop ends them, and removes their files.
func (s *server) stop() error { return errors.Join(s.env.Stop(), os.RemoveAll(s.dir)) }

// kubeconfig makes a user, and writes a file by which a program works as that user.
func (s *server) kubeconfig(user envtest.User) (string, error) {
	made, err := s.env.ControlPlane.AddUser(user, nil)
	if err != nil {
		return "", fmt.Errorf("make the user %s: %w", user.Name, err)
	}
	text, err := made.KubeConfig()
	if err != nil {
		return "", fmt.Errorf("make a kubeconfig for %s: %w", user.Name, err)
	}
	file := filepath.Join(s.dir, user.Name+".kubeconfig")
	return file, os.WriteFile(file, text, 0o600)
}
