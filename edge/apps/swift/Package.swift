// swift-tools-version:5.9
import PackageDescription

let package = Package(
    name: "EdgeKit",
    platforms: [.iOS(.v15), .macOS(.v12)],
    products: [.library(name: "EdgeKit", targets: ["EdgeKit"])],
    targets: [
        // The runtime in C, and the compiled model as assembly text.
        .target(name: "CEdge"),
        .target(name: "EdgeKit", dependencies: ["CEdge"], resources: [.copy("model.edge")]),
    ],
    cLanguageStandard: .c11
)
