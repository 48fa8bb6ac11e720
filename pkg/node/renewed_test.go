package node

import (
	"testing"

	"k8s.io/client-go/rest"

	"github.com/tessera-dra/tessera/pkg/tokentest"
)

// TestRenewedToken checks that the plugin reads a token again within a minute.
func TestRenewedToken(t *testing.T) {
	tokentest.Renewed(t, func(kubeconfig string) (*rest.Config, error) {
		return (&Config{Kubeconfig: kubeconfig}).restConfig()
	})
}
