package control

import (
	"testing"

	"k8s.io/client-go/rest"

	"github.com/tessera-dra/tessera/pkg/tokentest"
)

// TestRenewedToken checks that the controller reads a token again within a minute.
func TestRenewedToken(t *testing.T) {
	tokentest.Renewed(t, func(kubeconfig string) (*rest.Config, error) {
		config, err := RESTConfig(kubeconfig)
		if err != nil {
			return nil, err
		}
		return clientConfig(config), nil
	})
}
