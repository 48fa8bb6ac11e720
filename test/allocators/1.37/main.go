// The allocator of Kubernetes 1.37.
package main

import "github.com/tessera-dra/tessera/test/allocators/resourcev1"

func main() { resourcev1.Main() }
