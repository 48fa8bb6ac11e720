package cluster

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

// syncDelay is the file of a control plane that says how slow its disk is.
const syncDelay = "sync-delay"

// SlowEtcd makes each sync of a file of etcd take that much longer, and so each write to
// the API server. The first call restarts etcd, which doesn't sync otherwise.
func (c *Cluster) SlowEtcd(ctx context.Context, delay time.Duration) error {
	slow := []string{program("slowsync"), configDir + "/" + syncDelay}
	spec := c.controlPlaneSpec()
	etcd := &spec.Components[0]
	etcd.Args = slices.Concat(slow, slices.DeleteFunc(etcd.Args, func(arg string) bool { return arg == unsafeNoSync }))
	file := filepath.Join(c.machineConfigDir(controlPlane), syncDelay)
	_, err := os.Stat(file)
	if missing := errors.Is(err, fs.ErrNotExist); !missing {
		return errors.Join(err, os.WriteFile(file, []byte(delay.String()), 0o600))
	}
	build := exec.CommandContext(ctx, "go", "build", "-o", c.Binary("slowsync"), "github.com/tessera-dra/tessera/sim/cmd/slowsync")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build slowsync: %w: %s", err, out)
	}
	if err := errors.Join(os.WriteFile(file, []byte(delay.String()), 0o600), c.writeSpec(spec)); err != nil {
		return fmt.Errorf("make the disk slow: %w", err)
	}
	return c.restartSoon(ctx, controlPlane, etcd.Name)
}

// The authorities of the API server's certificate: the one that the cluster was made with,
// and the one that follows.
const (
	firstAuthority = "ca"
	nextAuthority  = "next-ca"
)

// rootAuthorities is the file of the authorities that pods trust. It isn't the signer's:
// the controller manager ends if that has two certificates.
const rootAuthorities = "root-ca.crt"

// RenewCertificate gives the API server another certificate of its authority.
func (c *Cluster) RenewCertificate(ctx context.Context) error {
	return c.renew(ctx, firstAuthority)
}

// AnnounceAuthority has everything trust a second authority, as an admin does before the
// API server has a certificate of it. Pods learn of it by their service account's files.
func (c *Cluster) AnnounceAuthority(ctx context.Context) error {
	next, err := newAuthority("localcluster-next-" + c.plan.name)
	if err != nil {
		return err
	}
	dir := c.machineConfigDir(controlPlane)
	old, err := os.ReadFile(filepath.Join(dir, firstAuthority+".crt"))
	if err != nil {
		return fmt.Errorf("read the cluster's CA: %w", err)
	}
	both := slices.Concat(old, next.pem)
	err = writeFiles(dir, map[string][]byte{
		rootAuthorities: both, nextAuthority + ".crt": next.pem, nextAuthority + ".key": next.keyPEM,
	})
	if err != nil {
		return err
	}
	files := []string{c.KubeconfigPath(), filepath.Join(dir, "controller-manager.kubeconfig"), filepath.Join(dir, "scheduler.kubeconfig")}
	for _, node := range c.Nodes() {
		files = append(files, filepath.Join(c.machineConfigDir(node), "kubelet.kubeconfig"))
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("read a kubeconfig: %w", err)
		}
		data = bytes.ReplaceAll(data, []byte(base64Text(old)), []byte(base64Text(both)))
		if err := os.WriteFile(file, data, 0o600); err != nil {
			return fmt.Errorf("write a kubeconfig: %w", err)
		}
	}
	for _, component := range []string{"kube-controller-manager", "kube-scheduler"} {
		if err := c.restartSoon(ctx, controlPlane, component); err != nil {
			return err
		}
	}
	for _, node := range c.Nodes() {
		if err := c.restartSoon(ctx, node, "kubelet"); err != nil {
			return err
		}
	}
	return nil
}

// UseAuthority gives the API server a certificate of the announced authority.
func (c *Cluster) UseAuthority(ctx context.Context) error { return c.renew(ctx, nextAuthority) }

// renew signs another certificate of the API server, and restarts it.
func (c *Cluster) renew(ctx context.Context, by string) error {
	a, err := readAuthority(c.machineConfigDir(controlPlane), by)
	if err != nil {
		return err
	}
	if err := c.writeServerCertificate(a); err != nil {
		return err
	}
	return c.restartSoon(ctx, controlPlane, "kube-apiserver")
}

// readAuthority reads the first certificate in a file, and its key.
func readAuthority(dir, name string) (*authority, error) {
	var blocks []*pem.Block
	for _, file := range []string{name + ".crt", name + ".key"} {
		data, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			return nil, fmt.Errorf("read the authority %s: %w", name, err)
		}
		block, _ := pem.Decode(data)
		if block == nil {
			return nil, fmt.Errorf("read the authority %s: %s has no PEM block", name, file)
		}
		blocks = append(blocks, block)
	}
	certificate, err := x509.ParseCertificate(blocks[0].Bytes)
	if err != nil {
		return nil, fmt.Errorf("read the authority %s: %w", name, err)
	}
	var key crypto.Signer
	if key, err = x509.ParseECPrivateKey(blocks[1].Bytes); err != nil {
		return nil, fmt.Errorf("read the key of the authority %s: %w", name, err)
	}
	return &authority{certificate: certificate, key: key}, nil
}
