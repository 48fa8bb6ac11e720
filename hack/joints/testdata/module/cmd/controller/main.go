// Controller has what counts in all that ships.
package main

import "github.com/tessera-dra/tessera/hack/joints/testdata/module/pkg/control"

func main() { control.Run(nil) }
