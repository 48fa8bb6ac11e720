package cluster

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func verify(t *testing.T, ca *authority, c credentials, options x509.VerifyOptions) *x509.Certificate {
	t.Helper()
	pair, err := tls.X509KeyPair(c.certificate, c.key)
	if err != nil {
		t.Fatalf("certificate and key don't belong together: %v", err)
	}
	certificate, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	options.Roots = x509.NewCertPool()
	if !options.Roots.AppendCertsFromPEM(ca.pem) {
		t.Fatal("the CA's PEM is unreadable")
	}
	if _, err := certificate.Verify(options); err != nil {
		t.Errorf("verify: %v", err)
	}
	return certificate
}

func TestClientCertificate(t *testing.T) {
	ca, err := newAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	c, err := ca.client("system:node:node-0", "system:nodes")
	if err != nil {
		t.Fatal(err)
	}
	certificate := verify(t, ca, c, x509.VerifyOptions{KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	if certificate.Subject.CommonName != "system:node:node-0" {
		t.Errorf("user %q", certificate.Subject.CommonName)
	}
	if diff := cmp.Diff([]string{"system:nodes"}, certificate.Subject.Organization); diff != "" {
		t.Errorf("groups: %s", diff)
	}
}

func TestServerCertificateCoversAllAddresses(t *testing.T) {
	ca, err := newAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	p := plan{slot: 5}
	c, err := ca.server("kube-apiserver", []string{"kubernetes.default.svc"}, p.apiserverAddresses()...)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"kubernetes.default.svc", "198.18.5.2", kubernetesIP, "127.0.0.1"} {
		verify(t, ca, c, x509.VerifyOptions{DNSName: name, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	}
}

func TestServiceAccountKey(t *testing.T) {
	public, private, err := newServiceAccountKey()
	if err != nil {
		t.Fatal(err)
	}
	if len(public) == 0 || len(private) == 0 {
		t.Error("a key is empty")
	}
}

func TestKeysAreReadableByRootOnly(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	if err := writeCredentials(dir, "x", credentials{[]byte("c"), []byte("k")}); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(dir, "x.key"))
	if err != nil {
		t.Fatal(err)
	}
	if got := info.Mode().Perm(); got != 0o600 {
		t.Errorf("key has mode %o", got)
	}
}
