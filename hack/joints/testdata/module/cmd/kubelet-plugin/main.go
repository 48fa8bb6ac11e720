// Kubelet-plugin has what counts in the plugin.
package main

import (
	"sync"

	"github.com/tessera-dra/tessera/hack/joints/testdata/module/pkg/node"
	"github.com/tessera-dra/tessera/hack/joints/testdata/module/pkg/node/journal"
	"github.com/tessera-dra/tessera/hack/joints/testdata/module/pkg/node/nodetest"
)

var mu sync.Mutex // want: lock

func main() {
	mu.Lock()
	node.Run()
	journal.Open()
	nodetest.Run()
}
