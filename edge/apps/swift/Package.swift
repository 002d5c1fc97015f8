// swift-tools-version:5.9
import PackageDescription

let package = Package(
    name: "EdgeKit",
    platforms: [.iOS(.v15), .macOS(.v12)],
    products: [.library(name: "EdgeKit", targets: ["EdgeKit"])],
    targets: [
        // The runtime in C, and the compiled model as assembly text.
        .target(
            name: "CEdge",
            linkerSettings: ["m", "dl", "pthread"].map { .linkedLibrary($0, .when(platforms: [.linux])) }
        ),
        .target(name: "EdgeKit", dependencies: ["CEdge"], resources: [.copy("model.edge")]),
        .testTarget(name: "EdgeKitTests", dependencies: ["EdgeKit"]),
    ],
    cLanguageStandard: .c11
)
